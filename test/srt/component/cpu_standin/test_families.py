"""The stand-in's answers for each family of models."""

import pytest

from component.programs import passed, run
from cpu_standin import gpu_device_node
from models.families import FAMILIES

pytestmark = pytest.mark.skipif(gpu_device_node() is not None, reason="refused beside a GPU")


@pytest.fixture(scope="module")
def output() -> str:
    """Output of one program, which imports SGLang once for all families."""
    return run(__file__, "program_families.py", *FAMILIES)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(output: str, family: str) -> None:
    """Guards against a form that is wrong in the same way on all servers, which then agree: swapped
    arguments, attention without positions, a rounded state."""
    passed(output, family)
