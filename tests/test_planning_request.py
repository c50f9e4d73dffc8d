"""A request is built and checked once; the integers of a kernel reach everything from their table; what pipelines ask
of a variant is asked once; and nobody above pipelines knows one by its name."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import flashgen as fg
from flashgen.cli import options
from flashgen.codegen import emit
from flashgen.errors import PlanError
from flashgen.lang.load import load_spec, shipped
from flashgen.lang.variant import Pins
from flashgen.ops.supports import Reason
from flashgen.planning import measured, planner, profile, records
from flashgen.planning.arch import ARCHS
from flashgen.planning.integers import INTEGERS, shown
from flashgen.planning.pipelines import table
from flashgen.planning.pipelines.hopper import forward as hopper
from flashgen.planning.plan import Tile
from flashgen.planning.request import Fixed, KernelRequest
from flashgen.runtime import cache

PACKAGE = Path(planner.__file__).parents[1]

CAUSAL = load_spec("causal").bind()

PASSES = {"forward": table.PIPELINES, "backward": table.BACKWARDS}


def request(variant=CAUSAL, arch="sm_90a", head_dim=64, **options):
    return KernelRequest.of(variant, arch, "bfloat16", head_dim, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The request


def test_equal_requests_share_a_menu():
    assert request() == request(v_head_dim=64) and request() != request(v_head_dim=128)
    assert planner.menu_of(request()) is planner.menu_of(request(v_head_dim=64))


def test_a_forward_takes_what_the_variant_pins_and_a_call_stands_before_it():
    pinned = dataclasses.replace(CAUSAL, pins=Pins(tile=(64, 32), stages=2, pipeline="ampere"))
    assert request(pinned).fixed == Fixed(tile=Tile(q=64, kv=32), stages=2, pipeline="ampere")
    assert request(pinned, tile=(128, 64), stages=3).fixed == Fixed(
        tile=Tile(q=128, kv=64), stages=3, pipeline="ampere"
    )
    assert request(pinned, backward=True).fixed == Fixed()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"deterministic": True},
            "deterministic is of a backward, .*\n  nearest: backward=True",
        ),
        ({"backward": True, "packed": True}, "packed is of a forward, .*\n  nearest: packed=False"),
        ({"backward": True, "q_stages": 1}, "q_stages is of a forward, .*\n  nearest: q_stages=None"),
        (
            {"backward": True, "gradients": ("bias",)},
            "'bias' has no gradient: .* no captured tensor\n  nearest: ",
        ),
        ({"arch": "sm_70"}, "it is below sm_80"),
    ],
)
def test_a_request_that_no_pipeline_could_serve_is_never_made(asked, message):
    with pytest.raises(PlanError, match=message):
        request(**asked)


@pytest.mark.parametrize(
    "asked", [{}, {"dropout": True}, {"packed": True}, {"backward": True, "deterministic": True, "dropout": True}]
)
def test_a_plan_says_which_request_it_serves(asked):
    made = request(**asked)
    for plan in planner.menu_of(made).plans:
        assert KernelRequest.of_plan(plan) == made.fixing(pipeline=None)
        assert plan.pass_name == made.pass_name and plan.dropout == made.dropout


# ---------------------------------------------------------------------------------------------------------------------
# The integers


@pytest.mark.sampled("q_stages")
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_taken_everywhere_or_refused_with_its_reason(name):
    row = INTEGERS[name]
    for pass_name, pipelines in PASSES.items():
        for pipeline in pipelines.values():
            one = next(iter(pipeline.candidates(Fixed(tile=None))))
            assert (name in pipeline.INTEGERS) == hasattr(one, name)
            arch = next(arch.name for arch in ARCHS.values() if pipeline.NAME in arch.pipelines)
            asked = {"arch": arch, "pipeline": pipeline.NAME, "backward": pass_name == "backward", "head_dim": 64}
            if pass_name not in row.passes or name not in pipeline.INTEGERS:
                (reason,) = fg.supports("causal", **asked, **{name: 2})
                absent = row.absent.format(pipeline=pipeline.NAME)
                assert absent in reason.limit or f"{name} is of a" in reason.limit
                continue
            for value in pipeline.INTEGERS[name].values:
                plan = fg.plan("causal", **asked, **{name: value})
                assert getattr(plan, name) == value and row.shown(value) in shown(plan)
                assert f"--{name.replace('_', '-')} {value}" in " ".join(emit(plan)[:2000].replace("//", "").split())
            allowed = pipeline.INTEGERS[name]
            assert fg.supports("causal", **asked, **{name: max(allowed.values)}) == ()
            with pytest.raises(PlanError, match=allowed.rule):
                fg.plan("causal", **asked, **{name: max(allowed.values) + 1})


@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_keys_kernels_and_is_an_option_of_the_command_line(name):
    plan = planner.menu_of(request()).plans[0]
    assert cache.key(plan) != cache.key(dataclasses.replace(plan, **{name: 7}))
    assert inspect.signature(_verb()).parameters[name].annotation is not inspect.Parameter.empty


def _verb():
    def verb(request: options.Request, which: options.Pass) -> None: ...

    return options.shared(verb)


def test_a_value_that_is_no_whole_number_is_refused_for_every_integer():
    for name, row in INTEGERS.items():
        (reason,) = fg.supports("causal", **{name: "many"})
        assert isinstance(reason, Reason) and reason.option == name
        assert row.kind is None or row.kind in reason.limit


def test_a_record_may_be_older_than_a_field_of_a_candidate():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Later(hopper.Candidate):
        depth: int = 4

    one = records.Timed(
        form=records.form({"tile": {"q": 128, "kv": 64}, "stages": 2, "q_stages": 1}), blocks_per_sm=1, ms=(1.0,)
    )

    class Pipeline:
        smem, plan = staticmethod(hopper.smem), staticmethod(hopper.plan)

        def __init__(self, depth):
            self.depth = depth

        def candidates(self, fixed):
            return (
                Later(tile=c.tile, stages=c.stages, q_stages=c.q_stages, depth=self.depth)
                for c in hopper.candidates(fixed)
            )

    assert measured.plan_of(Pipeline(4), request(), one).q_stages == 1
    assert measured.plan_of(Pipeline(8), request(), one) is None


# ---------------------------------------------------------------------------------------------------------------------
# The profile


def test_a_profile_is_made_once_and_analyses_nothing_for_a_request_that_is_refused(monkeypatch):
    assert request().profile is request(head_dim=128, dropout=True).profile
    fresh = fg.variant(lambda b, h, q, k: k * 3 <= q + 41)

    def analyse(variant):
        raise AssertionError("analysed")

    monkeypatch.setattr(profile, "analyse", analyse)
    with pytest.raises(PlanError, match="the tensor cores take 16-bit inputs"):
        planner.menu_of(KernelRequest.of(fresh, "sm_80", "float32", 64))
    with pytest.raises(AssertionError, match="analysed"):
        _ = request(fresh).profile.exact


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_profile_says_what_the_variant_is(name):
    variant = load_spec(name).bind()
    made = profile.profile(variant)
    assert made.masked == (variant.mask is not None) and made.scored == (variant.score_node is not None)
    assert made.uses_head == variant.uses("h") and made.uses_query == variant.uses("q")
    assert made.plain == (not variant.roots)
    assert not made.band or (made.exact and not variant.pair_tensors)
    assert bool(made.judged_nodes) == made.judged
    assert made.looks_up or not made.lookups
    if not variant.tensors:
        assert not (made.reads_by_key or made.loads_by_key or made.looks_up or made.lookups)


# ---------------------------------------------------------------------------------------------------------------------
# Nobody above pipelines knows one by its name


def decisions(path):
    """Comparisons with a pipeline's name, and with what only plans of one pipeline have."""
    for found in ast.walk(ast.parse(path.read_text())):
        if isinstance(found, ast.Compare):
            sides = [found.left, *found.comparators]
            names = {side.value for side in sides if isinstance(side, ast.Constant)}
            kept = {side.attr for side in sides if isinstance(side, ast.Attribute)}
            modules = {side.id for side in sides if isinstance(side, ast.Name)}
            if (names | modules) & {"hopper", "ampere"} or "specialized" in kept:
                yield f"{path.relative_to(PACKAGE)}:{found.lineno}"


@pytest.mark.slow
def test_no_decision_above_pipelines_is_made_by_the_name_of_one():
    above = [path for stage in ("ops", "bench", "cli") for path in (PACKAGE / stage).glob("*.py")]
    above.append(PACKAGE / "planning" / "planner.py")
    assert len(above) > 40
    assert [line for path in above for line in decisions(path)] == []


def test_a_decision_by_name_is_caught(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    bad = tmp_path / "bad.py"
    bad.write_text("a = p.pipeline == 'hopper'\nb = p.specialized is not None\nc = module is ampere\nd = x == 1\n")
    assert list(decisions(bad)) == ["bad.py:1", "bad.py:2", "bad.py:3"]


def test_what_is_nearest_to_an_option_of_the_other_pass_works():
    for name, value, nearest in (("kv_splits", 3, None), ("packed", True, False), ("invariant", True, False)):
        with pytest.raises(PlanError, match=f"nearest: {name}={nearest}$"):
            fg.plan("causal", arch="sm_90a", seqlen=64, backward=True, **{name: value})
        fg.plan("causal", arch="sm_90a", seqlen=64, backward=True, **{name: nearest})
