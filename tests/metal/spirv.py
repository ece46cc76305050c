"""Read a SPIR-V binary: its instructions, and the few facts that Metal has a rule about."""

import collections
import dataclasses

import numpy as np

MAGIC = 0x07230203
HEADER_WORDS = 5

OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_CAPABILITY = 15, 16, 17
OP_TYPE_INT, OP_TYPE_FLOAT, OP_TYPE_VECTOR, OP_TYPE_ARRAY, OP_TYPE_POINTER = 21, 22, 23, 28, 32
OP_CONSTANT, OP_FUNCTION, OP_FUNCTION_END, OP_VARIABLE, OP_DECORATE = 43, 54, 56, 59, 71
OP_CONVERT_F_TO_U, OP_CONVERT_F_TO_S = 109, 110
FLOAT_ARITHMETIC = {127: 1, 129: 2, 131: 2, 133: 2, 136: 2, 141: 2}  # F negate, add, sub, mul, div, mod: operand counts
OP_SELECT = 169
# Compare-and-swap is what Taichi makes of a float atomic (and of an integer multiplication) on Metal.
REFUSED_ATOMICS = {230: "compare-and-swap", 5614: "float min", 5615: "float max", 6035: "float add"}
SUBGROUP_FLOAT = {350, 352, 355, 358, 337}  # float add, mul, min, max, and broadcast
EXECUTION_MODE_LOCAL_SIZE = 17
DECORATION_BINDING, DECORATION_BUILTIN = 33, 11
STORAGE_INPUT, STORAGE_WORKGROUP = 1, 4
BUILTIN_SUBGROUP_SIZE, BUILTIN_SUBGROUP_LANE = 36, 41
GROUP_NON_UNIFORM = 61
# First and last opcode of each group of subgroup operations, and the capability that declares it.
SUBGROUP_CAPABILITIES = ((333, 333, 61), (334, 336, 62), (337, 344, 64), (345, 346, 65), (347, 348, 66), (349, 364, 63))


@dataclasses.dataclass
class Module:
    """Facts of one compute shader, and its words for :func:`declare_subgroups`."""

    words: np.ndarray
    version: int
    n_instructions: int  # inside functions
    group_size: int
    threadgroup_bytes: int
    bindings: list[int]
    refused_atomics: list[str]  # what kind, for each atomic instruction that Metal lacks
    has_float64: bool
    n_infinite: int  # float constants
    truncated: int  # subgroup results that Taichi took for integers, see `_truncations`
    subgroup_capabilities: set[int]
    inputs: list[int]  # ids of input variables


def _instructions(words):
    at = HEADER_WORDS
    while at < len(words):
        length, opcode = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        yield at, opcode, words[at + 1 : at + length]
        at += length


def read(data):
    """Parse the bytes of a module. Raises ValueError when they are not SPIR-V."""
    words = np.frombuffer(data, "<u4")
    if len(words) < HEADER_WORDS or words[0] != MAGIC:
        raise ValueError("not a SPIR-V module: wrong magic number")
    by_opcode = collections.defaultdict(list)
    inside, n_instructions = False, 0
    for _, opcode, operands in _instructions(words):
        inside |= opcode == OP_FUNCTION
        n_instructions += inside
        inside &= opcode != OP_FUNCTION_END
        by_opcode[opcode].append([int(word) for word in operands])
    modes = {mode: operands for _, mode, *operands in by_opcode[OP_EXECUTION_MODE]}
    variables = [(pointer, id, storage) for pointer, id, storage, *_ in by_opcode[OP_VARIABLE]]
    widths = {id: bits for id, bits, *_ in by_opcode[OP_TYPE_FLOAT]}
    sizes = _type_sizes(by_opcode)
    pointees = {id: pointee for id, _, pointee in by_opcode[OP_TYPE_POINTER]}
    needs = {
        capability
        for first, last, capability in SUBGROUP_CAPABILITIES
        if any(map(by_opcode.get, range(first, last + 1)))
    }
    builtins = {decoration[2] for decoration in by_opcode[OP_DECORATE] if decoration[1] == DECORATION_BUILTIN}
    if needs or builtins & {BUILTIN_SUBGROUP_SIZE, BUILTIN_SUBGROUP_LANE}:
        needs.add(GROUP_NON_UNIFORM)
    return Module(
        words=words,
        version=int(words[1]),
        n_instructions=n_instructions,
        group_size=int(np.prod(modes[EXECUTION_MODE_LOCAL_SIZE])),
        threadgroup_bytes=sum(sizes[pointees[p]] for p, _, storage in variables if storage == STORAGE_WORKGROUP),
        bindings=sorted(d[2] for d in by_opcode[OP_DECORATE] if d[1] == DECORATION_BINDING),
        refused_atomics=[kind for opcode, kind in REFUSED_ATOMICS.items() for _ in by_opcode[opcode]],
        has_float64=64 in widths.values(),
        n_infinite=sum(_is_infinite(constant, widths) for constant in by_opcode[OP_CONSTANT]),
        truncated=_truncations(by_opcode),
        subgroup_capabilities=needs,
        inputs=[id for _, id, storage in variables if storage == STORAGE_INPUT],
    )


def _type_sizes(by_opcode):
    constants = {id: value for _, id, value, *_ in by_opcode[OP_CONSTANT]}
    sizes = {id: bits // 8 for id, bits, *_ in by_opcode[OP_TYPE_INT] + by_opcode[OP_TYPE_FLOAT]}
    sizes |= {id: sizes.get(element, 0) * count for id, element, count in by_opcode[OP_TYPE_VECTOR]}
    sizes |= {id: sizes.get(element, 0) * constants[count] for id, element, count in by_opcode[OP_TYPE_ARRAY]}
    return sizes


def _is_infinite(constant, widths):
    """Whether a constant is an infinity; a NaN is what SPIRV-Tools makes of 0/0 behind a loop that may be empty."""
    kind, _, bits, *_ = constant
    return bits in {16: (0x7C00, 0xFC00), 32: (0x7F800000, 0xFF800000)}.get(widths.get(kind), ())


def _truncations(by_opcode):
    """Count float-to-integer conversions of subgroup results, or of arithmetic on nothing but such results.

    Taichi takes each subgroup result for an i32 once its optimiser has removed the variable it was kept in. A second
    float operand repairs that; two subgroup results added, or one negated, become an integer and lose their fraction.
    """
    tainted = {operands[1] for opcode in SUBGROUP_FLOAT for operands in by_opcode[opcode]}
    grown = -1
    while grown != len(tainted):
        grown = len(tainted)
        for opcode, count in FLOAT_ARITHMETIC.items():
            tainted |= {o[1] for o in by_opcode[opcode] if all(x in tainted for x in o[2 : 2 + count])}
        tainted |= {o[1] for o in by_opcode[OP_SELECT] if o[3] in tainted and o[4] in tainted}
    return sum(o[2] in tainted for op in (OP_CONVERT_F_TO_U, OP_CONVERT_F_TO_S) for o in by_opcode[op])


def declare_subgroups(module):
    """Bytes of the module with the declarations that Taichi leaves out around subgroup operations.

    No Taichi backend declares the subgroup capabilities or lists the subgroup inputs at the entry point. SPIRV-Cross
    does not ask for them, spirv-val does, and would say nothing else if they were missing.
    """
    out = [module.words[:HEADER_WORDS]]
    pending = sorted(module.subgroup_capabilities)
    for at, opcode, operands in _instructions(module.words):
        length = len(operands) + 1
        if opcode != OP_CAPABILITY:
            out += [np.array([2 << 16 | OP_CAPABILITY, capability], "<u4") for capability in pending]
            pending = []
        if opcode == OP_ENTRY_POINT:
            listed = {int(word) for word in operands}
            extra = [id for id in module.inputs if id not in listed]
            out.append(np.array([(length + len(extra)) << 16 | opcode, *operands.tolist(), *extra], "<u4"))
        else:
            out.append(module.words[at : at + length])
    return np.concatenate(out).astype("<u4").tobytes()
