"""The search's own parts: models are drawn alike, print as files that run, and shrink."""

import ast
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.grammar import BACKENDS, RECIPES, draw_program
from tests.fuzz.processes import Answerer, Died, Hung
from tests.fuzz.program import Input, Program, Step, source
from tests.fuzz.shrink import failure_class, shrink

# torch's tracing of a loop's body asks tensors for their gradients, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def loaded(text):
    module = ModuleType("drawn_program")
    sys.modules[module.__name__] = module  # torch.cond's tracing imports it
    exec(compile(text, "drawn.py", "exec"), vars(module))
    return vars(module)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(BACKENDS))
def test_program_when_drawn_twice_then_the_same_file_that_runs_at_each_size(seed, backend):
    program = draw_program(seed, backend)
    text = source(program)
    assert text == source(draw_program(seed, backend))
    assert program.recipe in RECIPES[backend]
    scope = loaded(text)
    model = scope["model"]()
    args, kwargs = scope["batch"](0, **scope["SIZES"][0])
    model(*args, **kwargs)
    assert {"Model", "DYNAMIC", "STRICT", "BACKEND"} <= scope.keys()


def test_program_when_no_seed_is_alike_then_many_operators_are_drawn():
    texts = "\n".join(source(draw_program(seed)) for seed in range(120))
    calls = {
        ast.unparse(node.func)
        for part in texts.split('"""Model ')[1:]
        for node in ast.walk(ast.parse('"""' + part))
        if isinstance(node, ast.Call)
    }
    assert len({c for c in calls if c.startswith(("F.", "torch.", "nn."))}) > 90
    assert "Dim.AUTO" in texts
    assert "channels_last" in texts


def chain(*texts, result="v2"):
    return Program(
        seed=0,
        backend="cpu",
        recipe="int8",
        inputs=(Input(name="x0", text="torch.randn(4, 8)", keyword=True),),
        attributes=(("m0", ("self.m0 = nn.Linear(8, 8)",)), ("m1", ("self.m1 = nn.ReLU()",))),
        steps=tuple(Step(target=f"v{at}", text=text) for at, text in enumerate(texts)),
        result=result,
    )


def test_shrink_when_one_statement_fails_then_it_alone_is_left():
    program = chain("self.m0(x0)", "torch.erf(v0)", "self.m1(v1)")
    small = shrink(program, lambda p: any("erf" in s.text for s in p.steps))
    assert [s.text for s in small.steps] == ["torch.erf(x0)"]
    assert small.attributes == ()
    assert small.inputs == (Input(name="x0", text="torch.randn(1, 1)"),)
    args, kwargs = loaded(source(small))["batch"](0)
    assert torch.equal(loaded(source(small))["model"]()(*args, **kwargs), torch.erf(args[0]))


def test_shrink_when_nothing_smaller_fails_then_the_program_itself():
    program = chain("self.m0(x0)", result="v0")
    assert shrink(program, lambda p: False) == program


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("call 0: output 0: SQNR 3.1 dB", "call 2: output 1: SQNR 9.0 dB", True),
        ("call 0: output 0: SQNR 3.1 dB", "call 0: structure A, expected B", False),
    ],
)
def test_failures_when_their_words_are_alike_then_one_class(left, right, same):
    answers = [
        {"outcome": "wrong", "stage": "run", "error": "", "detail": d} for d in (left, right)
    ]
    first, second = map(failure_class, answers)
    assert (first == second) is same


def test_answerer_when_its_process_dies_or_hangs_then_says_so_and_answers_the_next():
    answerer = Answerer("tests.fuzz.faulty_worker")
    with pytest.raises(Died, match="exit status -6"):
        answerer.ask({"do": "abort"}, limit_s=60)
    with pytest.raises(Hung):
        answerer.ask({"do": "hang"}, limit_s=0.5)
    assert answerer.ask({"do": "answer"}, limit_s=60) == {"done": "answer"}
    assert answerer.ask({"do": "wait"}, limit_s=1) == {"done": "wait"}  # it had no CPU time
    answerer.close()
