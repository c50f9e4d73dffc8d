"""Tests marked `gpu` skip, with the reason, where there is no GPU; tests marked `nightly`, and those of a test marked
`sampled` that the mark leaves out, run with --nightly alone; PyTorch's CPU work stays on one thread; the seed of the
fuzzers is a fresh one, the same in every process of a run."""

import collections
import gc
import os
import secrets

import pytest

#: (file, function, names of its parameters, marks, what the nightly mark is given, what a sampled mark names) of every
#: test that was found, those left out too.
COLLECTED = pytest.StashKey[list]()

# The matrices of the tests are small: threads that wait for each other cost more than they bring, ten times more where
# something else uses the cores.  Read by PyTorch when it is imported, here and in subprocesses.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.setdefault("FLASHGEN_FUZZ_SEED", str(secrets.randbelow(1 << 30)))


def pytest_addoption(parser):
    parser.addoption("--nightly", action="store_true", help="run the tests marked nightly too, as .ci/nightly does")


def pytest_report_header(config):
    nightly = "run too" if config.getoption("--nightly") else "left out (--nightly runs them)"
    return [f"fuzz: FLASHGEN_FUZZ_SEED={os.environ['FLASHGEN_FUZZ_SEED']}", f"nightly tests: {nightly}"]


# Modules and thousands of tests stay: no collection of garbage need go through them, while they come or later.
gc.disable()


def pytest_collection_finish(session):
    """Parsing and planning make many objects and few cycles: young ones are collected a hundredth as often."""
    gc.freeze()
    gc.set_threshold(70_000, 10, 10)
    gc.enable()


def axes(sampled):
    """The parameters that a sampled mark has values of, and these."""
    return {} if sampled is None else {name: values for name, values in sampled.kwargs.items() if name != "every"}


def names_of(item, sampled):
    """What a sampled mark may name of a test: the id of its parameters, then name=value of those that it has values
    of."""
    if not hasattr(item, "callspec"):
        return [""]
    return [item.callspec.id, *(f"{name}={item.callspec.params[name]!r}" for name in axes(sampled))]


def in_sample(item, sampled, turn):
    """Whether CI runs a test that `turn` others of its function stand before."""
    every, of = sampled.kwargs.get("every"), axes(sampled)
    if item.callspec.id in sampled.args or (every and turn % every == 0):
        return True
    return bool(of) and all(item.callspec.params[name] in values for name, values in of.items())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    rows = config.stash[COLLECTED] = []
    seen = collections.Counter()  # tests of each function
    for item in items:
        sampled, function = item.get_closest_marker("sampled"), (item.path, item.originalname)
        if sampled and not in_sample(item, sampled, seen[function]):
            item.add_marker(pytest.mark.nightly(sibling=item.originalname))
        seen[function] += 1
        of = axes(sampled).items()
        named = sampled and [*sampled.args, *(f"{name}={value!r}" for name, values in of for value in values)]
        nightly = item.get_closest_marker("nightly")
        given = None if nightly is None else (list(nightly.args), nightly.kwargs)
        marks, names = {mark.name for mark in item.iter_markers()}, names_of(item, sampled)
        rows.append((str(item.path), item.originalname, names, marks, given, named))
    if not config.getoption("--nightly"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from flashgen.runtime import driver

    if driver.gpus() == 0:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
