"""What an optimized module moves, read off its text."""

from __future__ import annotations

import pytest

from tfgpipe.accelerators import compile_process

pytestmark = pytest.mark.pure

_MODULE = """
HloModule some, is_scheduled=true

%fused (param_0: bf16[8]) -> bf16[8] {
  %param_0 = bf16[8]{0} parameter(0)
  ROOT %inner = bf16[8]{0} negate(bf16[8]{0} %param_0)
}

ENTRY %main (x: bf16[8], y: f32[4]) -> bf16[8] {
  %x = bf16[8]{0:T(8,128)(2,1)} parameter(0)
  %y = f32[4]{0} parameter(1)
  %start = (bf16[8]{0:S(1)}, bf16[8]{0}, u32[]{:S(2)}) copy-start(bf16[8]{0} %x)
  %done = bf16[8]{0:S(1)} copy-done((bf16[8]{0:S(1)}, bf16[8]{0}) %start)
  %z = bf16[8]{0} fusion(bf16[8]{0:S(1)} %done), kind=kLoop, calls=%fused
  ROOT %sum = bf16[8]{0} add(bf16[8]{0} %z, f32[4]{0} %y)
}
"""


def test_what_stays_on_the_chip_is_not_moved() -> None:
    # Read by the copy, written by the fusion; read and read and written by the sum.
    assert compile_process.memory_bytes(_MODULE) == 16 + 16 + (16 + 16 + 16)


def test_the_workspace_of_a_library_is_not_moved() -> None:
    moved = compile_process.library_bytes(
        "(bf16[8]{0}, s8[4194304]{0})", "f32[8,2]{1,0} %x, pred[16]{0} %y"
    )
    assert moved == 16 + 64 + 16
