"""Control flow of a kernel: basic blocks, the order that makes diverged lanes meet again, and unwritten registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.interpreter.errors import UnknownInstruction
from flashgen.interpreter.ops import SUSPENDING
from flashgen.interpreter.parser import Entry, Instruction, Label, Operand, Probe, Reg, Sym


@dataclass(frozen=True, slots=True)
class RawEnd:
    kind: str  # "jump" | "fork" | "leave" | "fall" | "suspend"
    target: int = -1
    other: int = -1
    predicate: Reg | None = None
    negated: bool = False


@dataclass(slots=True)
class RawBlock:
    items: list[Instruction | Probe] = field(default_factory=list)
    end: RawEnd = field(default_factory=lambda: RawEnd("fall"))
    end_instruction: Instruction | None = None


@dataclass(slots=True)
class Graph:
    blocks: list[RawBlock]
    successors: list[tuple[int, ...]]
    ranks: list[int]


#: Opcodes that a whole warp executes together, with the operand that names its lanes (None: all that still run).
_TOGETHER: dict[tuple[str, ...], int | None] = {
    ("shfl", "sync"): -1,
    ("vote", "sync"): 2,
    ("redux", "sync"): 2,
    ("elect", "sync"): 1,
    ("bar", "warp"): 0,
    ("barrier", "warp"): 0,
    **{(name,): None for name in ("bar", "barrier", "mma", "ldmatrix", "stmatrix", "wgmma", "setmaxnreg")},
}


def together(item: Instruction | Probe) -> tuple[bool, Operand | None]:
    """Whether a warp executes an instruction together, and the operand that names the lanes."""
    if isinstance(item, Instruction):
        for used in (2, 1):
            if item.parts[:used] in _TOGETHER:
                place = _TOGETHER[item.parts[:used]]
                return True, None if place is None else item.operands[place]
    return False, None


#: What the opcodes of SUSPENDING begin with, which few others do.
_MAY_SUSPEND = {s[0] for s in SUSPENDING}


def _suspends(item: Instruction | Probe) -> bool:
    if not isinstance(item, Instruction) or item.parts[0] not in _MAY_SUSPEND:
        return False
    return any(item.parts[: len(s)] == s for s in SUSPENDING)


def split(entry: Entry) -> Graph:
    """Cut a kernel at labels, branches, instructions that may wait, and where a warp must be together."""
    blocks: list[RawBlock] = [RawBlock()]
    at: dict[str, int] = {}
    raw: list[Instruction | None] = [None]
    for item in entry.body:
        if isinstance(item, Label):
            if blocks[-1].items or raw[-1]:
                blocks.append(RawBlock())
                raw.append(None)
            at[item.name] = len(blocks) - 1
        elif isinstance(item, Instruction) and item.parts[0] in ("bra", "ret", "exit"):
            raw[-1] = item
            blocks.append(RawBlock())
            raw.append(None)
        else:
            if together(item)[0] and blocks[-1].items and not any(together(x)[0] for x in blocks[-1].items):
                blocks.append(RawBlock())  # diverged lanes wait for each other here
                raw.append(None)
            blocks[-1].items.append(item)
            if _suspends(item):
                blocks[-1].end = RawEnd("suspend")
                blocks.append(RawBlock())
                raw.append(None)
    if blocks[-1].items or raw[-1] is not None:
        raise UnknownInstruction(f"kernel {entry.name} runs past its end")
    blocks[-1].end = RawEnd("leave")  # also where lanes go that leave under a predicate
    successors = []
    for n, (block, item) in enumerate(zip(blocks, raw, strict=True)):
        if item is not None:
            block.end = _end(item, n, at, len(blocks) - 1)
            block.end_instruction = item
        end = block.end
        if end.kind in ("fall", "suspend"):
            successors.append((n + 1,))
        else:
            successors.append(tuple(x for x in (end.target, end.other) if x >= 0))
    return Graph(blocks, successors, _ranks(successors))


def _end(item: Instruction, n: int, at: dict[str, int], last: int) -> RawEnd:
    if item.parts[0] != "bra":
        if item.guard is not None:
            return RawEnd("fork", target=last, other=n + 1, predicate=item.guard, negated=item.guard_negated)
        return RawEnd("leave")
    target = item.operands[0]
    if not isinstance(target, Sym) or target.name not in at or item.parts[1:] not in ((), ("uni",)):
        raise UnknownInstruction(f"{item.opcode} in this form is not modelled", line=item.line, text=item.text)
    if item.guard is None:
        return RawEnd("jump", target=at[target.name])
    return RawEnd("fork", target=at[target.name], other=n + 1, predicate=item.guard, negated=item.guard_negated)


# ---------------------------------------------------------------- the order of execution of diverged lanes
def _ranks(successors: list[tuple[int, ...]]) -> list[int]:
    """A number for each block such that lanes waiting at the highest meet those still below it.

    Blocks of a loop come before what follows the loop: strongly connected components in topological order, and
    within one, the same after its edges back to the entry are removed.
    """
    order: list[int] = []

    def arrange(nodes: list[int], edges: dict[int, list[int]]) -> None:
        for component in _components(nodes, edges):
            if len(component) == 1:
                order.append(component[0])
                continue
            inside = set(component)
            header = min(component)
            entered = [y for x in nodes if x not in inside for y in edges[x] if y in inside]
            if entered:
                header = min(entered)
            cut = {x: [y for y in edges[x] if y in inside and y != header] for x in component}
            arrange(sorted(component), cut)

    arrange(list(range(len(successors))), {x: list(ys) for x, ys in enumerate(successors)})
    ranks = [0] * len(successors)
    for rank, block in enumerate(order):
        ranks[block] = rank
    return ranks


def _components(nodes: list[int], edges: dict[int, list[int]]) -> list[list[int]]:
    """Strongly connected components, sources first (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    out: list[list[int]] = []
    for root in nodes:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for child in rest:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    on_stack.add(child)
                    work.append((child, iter(edges[child])))
                    break
                if child in on_stack:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        x = stack.pop()
                        on_stack.discard(x)
                        component.append(x)
                        if x == node:
                            break
                    out.append(component)
    return out[::-1]


# ---------------------------------------------------------------- registers that some path reads unwritten
def maybe_unwritten(lines: list[list[tuple[set[str], set[str], bool]]], graph: Graph, registers: set[str]) -> set[str]:
    """Registers read at a point that some path reaches without a write of them (to be watched at run time).

    `lines` holds (reads, writes, guarded) for each instruction of each block.
    """
    number = {name: n for n, name in enumerate(sorted(registers))}
    everything = (1 << len(number)) - 1
    written = [everything] * len(lines)
    written[0] = 0

    def bits(names: set[str]) -> int:
        out = 0
        for name in names:
            out |= 1 << number[name]
        return out

    summary = [bits(set().union(*(writes for _, writes, guarded in code if not guarded))) for code in lines]
    pending = {0}
    reached: set[int] = set()
    while pending:
        n = pending.pop()
        reached.add(n)
        after = written[n] | summary[n]
        for child in graph.successors[n]:
            meet = written[child] & after
            if meet != written[child] or child not in reached:
                written[child] = meet
                pending.add(child)
    found = 0
    for n, code in enumerate(lines):
        if n not in reached:
            continue
        have = written[n]
        for reads, writes, guarded in code:
            found |= bits(reads) & ~have
            if not guarded:
                have |= bits(writes)
        predicate = graph.blocks[n].end.predicate
        if predicate is not None:
            found |= bits({predicate.name}) & ~have
    return {name for name, n in number.items() if found >> n & 1}
