"""What a model is held in, opened as one side of a comparison."""

import copy

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.analysis.open_side import is_quantized, open_file, open_graph
from pt2e_quant.core.errors import ConfigError, InputError


def test_open_graph_when_given_each_form_then_it_says_which(made):
    model, program, prepared, quantized, batches = made
    words = {open_graph(form, batches[0]).words for form in (model, program, prepared, quantized)}
    assert words == {
        "the module Residual",
        "the float program",
        "the prepared graph",
        "the quantized graph",
    }
    assert open_graph("a string", batches[0]) is None


def test_open_graph_when_a_module_is_quantized_then_it_is_its_canonical_graph(made):
    model, batches = copy.deepcopy(made[0]), made[-1]
    pq.quantize_(model, "w8")  # in the layout of this machine, which torch.export cannot take
    side = open_graph(model, batches[0])
    assert side.words == "the quantized module Residual"
    assert is_quantized(side.gm)
    (result,) = side.run([batches[0]], lambda site, value: None)
    assert pq.sqnr_db(model(batches[0]), result) > 60


def test_open_graph_when_the_batch_has_labels_then_the_error_names_the_argument(made):
    with pytest.raises(InputError, match=r"(?s)too many positional arguments.*inputs=0"):
        open_graph(made[0], (made[-1][0], torch.zeros(4)))


def test_open_graph_when_a_program_is_float_then_norms_are_folded_and_it_is_not_changed(made):
    model, program, _, _, batches = made
    before = {k: v.clone() for k, v in program.state_dict.items()}
    side = open_graph(program, None)
    assert not is_quantized(side.gm)
    assert not any("batch_norm" in str(node.target) for node in side.gm.graph.nodes)
    (result,) = side.run([batches[0]], lambda site, value: None)
    torch.testing.assert_close(result, model(batches[0]), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in program.state_dict.items())


def test_open_file_when_no_backend_writes_such_files_then_the_error_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"\.onnx"):
        open_file("model.tflite")
    assert open_file(3) == 3
