"""Reading PTX: scopes, operands, initialisers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_kernels import instruction, launch

from flashgen.interpreter import (
    BadLaunch,
    Memory,
    PtxSyntaxError,
    StepLimit,
    UnknownInstruction,
    WrongTarget,
    errors,
    load,
)
from flashgen.interpreter.parser import Imm, Mem, Reg, Sym, Vec, parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def body(text: str, head: str = HEAD) -> list:
    return (
        parse(f"{head}.visible .entry k() {{ .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .pred %p<3>;\n{text} ret; }}")
        .entries["k"]
        .body
    )


def test_operands():
    add, load_, tensor = body(
        "@!%p1 add.s32 %r1, %r2, -7; ld.shared.v2.u32 {%r1, %r2}, [%rd1+16];"
        " cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%r1], [%rd1, {%r2, %r3}], [%r4];"
    )[:3]
    assert (add.opcode, add.guard, add.guard_negated) == ("add.s32", Reg("%p1", "pred"), True)
    assert add.operands[2] == Imm(-7)
    assert load_.operands == (Vec((Reg("%r1", "b32"), Reg("%r2", "b32"))), Mem(Reg("%rd1", "b64"), 16))
    assert tensor.parts[4:7] == ("2d", "shared::cluster", "global")
    assert tensor.operands[1] == Mem(Reg("%rd1", "b64"), 0, (Reg("%r2", "b32"), Reg("%r3", "b32")))


def test_inline_assembly_scopes_keep_their_registers_and_labels_apart():
    loop = "{ .reg .pred p; .reg .b32 n; mov.u32 n, %t; AGAIN: sub.u32 n, n, 1; setp.ne.u32 p, n, 0; @p bra AGAIN; }"
    x = np.arange(64, dtype=np.uint32)
    text = f"mov.u32 %t, 3; {loop} add.u32 %t, %t, 2; {loop} add.u32 %o, %a, %t;"
    np.testing.assert_array_equal(instruction(text, np.uint32, x), x + 5)


def test_comments_and_line_numbers():
    with pytest.raises(UnknownInstruction, match="PTX line 7: frobnicate"):
        load(HEAD + "/* two\nlines */ .entry k() { // here\n .reg .b32 %r<2>;\nfrobnicate.b32 %r1; ret; }").program("k")


def test_initialised_variables_are_read():
    source = (
        HEAD
        + """
.global .align 4 .u32 table[4] = {5, 6, 0x7, 8};
.const .align 4 .f32 half = 0f3F000000;
.visible .entry k(.param .u64 out) {
  .reg .b32 %r<3>; .reg .f32 %f<2>; .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [out];
  ld.global.u32 %r1, [table+8];
  st.global.u32 [%rd1], %r1;
  ld.const.f32 %f1, [half];
  st.global.f32 [%rd1+4], %f1;
  ret; }"""
    )
    out = np.zeros(2, np.uint32)
    memory = Memory()
    address = memory.add("out", out, writable=True)
    load(source).launch("k", 1, 1, 0, [address.to_bytes(8, "little")], memory)
    assert out.tolist() == [7, 0x3F000000]


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("hello", PtxSyntaxError, "'hello' is not modelled at module scope"),
        ("", PtxSyntaxError, "no .target"),
        (HEAD + ".entry k() { add.s32 %r1", PtxSyntaxError, "ends within a statement"),
        (HEAD + ".entry k() { .reg .b32 %r<2>; mov.b32 %r1, ~; }", PtxSyntaxError, "cannot read '~"),
        (HEAD + ".entry k() { bra NOWHERE; }", PtxSyntaxError, "no label NOWHERE"),
        (".version 8.0\n.target sm_80\n.address_size 32\n", PtxSyntaxError, "only 64-bit"),
    ],
)
def test_bad_text_is_refused(text, error, match):
    with pytest.raises(error, match=match):
        load(text)


def test_ptx_for_another_target_is_refused():
    with pytest.raises(WrongTarget, match="this PTX is for sm_80, not for sm_90a: compile it for sm_90a"):
        load(HEAD, target="sm_90a")


def test_launches_that_a_driver_would_refuse():
    module = load(HEAD + ".entry k(.param .u64 p, .param .u32 n) .maxntid 64, 1, 1 { ret; }")
    with pytest.raises(BadLaunch, match="no kernel 'q' in this module \\(it has k\\)"):
        module.launch("q", 1, 32, 0, [], Memory())
    with pytest.raises(BadLaunch, match=r"128 threads per block: kernel k takes 1\.\.64"):
        module.launch("k", 1, 128, 0, [bytes(8), bytes(4)], Memory())
    with pytest.raises(BadLaunch, match="1 parameters: kernel k takes 2"):
        module.launch("k", 1, 32, 0, [bytes(8)], Memory())
    with pytest.raises(BadLaunch, match="parameter n has 8 bytes, not 4"):
        module.launch("k", 1, 32, 0, [bytes(8), bytes(8)], Memory())
    with pytest.raises(BadLaunch, match="11 bytes of parameters: kernel k takes 12"):
        module.launch("k", 1, 32, 0, bytes(11), Memory())
    with pytest.raises(BadLaunch, match="no positive multiple of the cluster"):
        module.launch("k", 3, 32, 0, bytes(12), Memory(), cluster=2)


def test_a_kernel_that_never_ends_meets_the_step_limit():
    source = """extern "C" __global__ void k(volatile int* out) { while (out[0] == 0) {} }"""
    with pytest.raises(StepLimit, match="more than 5000 warp instructions: the kernel may never end"):
        launch(source, {"out": np.zeros(1, np.int32)}, step_limit=5000)


def test_a_register_that_some_path_leaves_unwritten_is_watched():
    text = "setp.lt.u32 %p, %a, 40; @%p mov.u32 %t, 5; add.u32 %o, %t, 1;"
    np.testing.assert_array_equal(instruction(text, np.uint32, np.arange(32, dtype=np.uint32)), np.full(32, 6))


def test_a_branch_on_an_unwritten_predicate_traps():
    text = "setp.lt.u32 %q, %a, 8; mov.u32 %o, 1; @%q setp.lt.u32 %p, %a, 100; @%p bra DONE; mov.u32 %o, 2; DONE:"
    with pytest.raises(errors.Uninitialised, match="a branch is taken on a predicate that nothing wrote"):
        instruction(text, np.uint32, np.arange(32, dtype=np.uint32))
    np.testing.assert_array_equal(instruction(text, np.uint32, np.arange(8, dtype=np.uint32)), np.full(8, 1))


def test_probes_record_values_of_warps():
    source = """extern "C" __global__ void k(int* out) {
      for (int i = 0; i < 2; i++) asm volatile("// probe: step %0 %1" :: "r"(i), "r"(threadIdx.x / 32));
      out[threadIdx.x] = 1; }"""
    report = launch(source, {"out": np.zeros(64, np.int32)}, block=64)
    assert sorted(report.probes) == [("step", 0, w, (i, w)) for i in (0, 1) for w in (0, 1)] or sorted(
        report.probes
    ) == [("step", 0, w, (i, w)) for w in (0, 1) for i in (0, 1)]


def test_symbols_have_addresses():
    (move,) = body("mov.u64 %rd1, somewhere;")[:1]
    assert move.operands[1] == Sym("somewhere")
    with pytest.raises(UnknownInstruction, match="the symbol somewhere"):
        load(HEAD + ".entry k() { .reg .b64 %rd<2>; mov.u64 %rd1, somewhere; ret; }").program("k")
