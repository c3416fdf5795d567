"""Both operators inside torch.compile on a simulated NPU, with the backends that need no code generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from strategies import Call
from support import LOAD, NPU, PHASE_TWO, SCATTER, calls, launched, operator
from test_device_capabilities import load_call, scatter_call

from pacache_torch import reference


def compiled(op: str, backend: str, dynamic: bool) -> Callable[..., None]:
    def function(*arguments: torch.Tensor, **keyword: object) -> None:
        operator(op)(*arguments, **keyword)

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("op", (SCATTER, LOAD))
def test_compiled(op: str, backend: str, dynamic: bool) -> None:
    """The caller's caches and outputs are written, by one launch of the device operator."""
    call: Call = scatter_call("None", torch.float16) if op == SCATTER else load_call("Norm", torch.float16)
    expected, actual = call.clone(), call.clone(NPU)
    expected.run(getattr(reference, op))
    torch._dynamo.reset()
    function = compiled(op, backend, dynamic)
    with calls() as made:
        actual.run(function)
    assert launched(made) == {PHASE_TWO[op]: 1}
    assert actual.clone("cpu").differences(expected) == []
