"""Calls from two threads at once, on one artifact and on two."""

from concurrent.futures import ThreadPoolExecutor

from tests.faults.conftest import call, equal, lowered

CALLS = [call(1 + seed % 8, seed) for seed in range(40)]


def test_artifact_when_two_threads_call_it_then_each_result_as_alone(artifact):
    alone = [artifact.run(*one) for one in CALLS]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: artifact.run(*one), CALLS))
    assert all(equal(f, a) for f, a in zip(found, alone, strict=True))


def test_artifacts_when_two_threads_call_one_each_then_each_result_as_alone(backend, artifact):
    other = lowered(backend)
    alone = [artifact.run(*one) for one in CALLS]
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(lambda program: [program.run(*one) for one in CALLS], program)
            for program in (artifact, other)
        ]
        for run in runs:
            assert all(equal(f, a) for f, a in zip(run.result(), alone, strict=True))
