// What the Metal shim asks of the driver: who am I, wait for the others, complain.
// No math or string header here: a C function (sinh, say) must not stand in for a Metal one that is not modelled.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

using uint = unsigned int;
using uchar = unsigned char;
using ushort = unsigned short;
using ulong = unsigned long;
using half = _Float16;
static_assert(sizeof(long) == 8 && sizeof(half) == 2, "Metal's long has 64 bits and its half 16");

namespace metal_shim {

constexpr uint simd_width = 32;

struct Position {
    uint x, y, z;
};

// One SIMD group's deposit in a cross-lane operation: bits of every lane's operand.
struct Lanes {
    const uint64_t* bits;
    uint count;  // lanes that exist: 32, or fewer in a threadgroup that does not fill its last SIMD group
    uint self;
};

Position position_in_grid();
Position position_in_threadgroup();
Position position_of_threadgroup();
Position threadgroups_in_grid();
uint lane_in_simdgroup();

// Blocks until every thread of the threadgroup is at the same call of it. Anything else is an error.
void threadgroup_wait(int line);
// Blocks until every lane of the SIMD group is at the same operation, then shows what each brought.
Lanes simdgroup_exchange(uint64_t bits, const char* operation, int line);

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void buffer_fault(const void* buffer, uint64_t index, size_t element_bytes);
void register_threadgroup_memory(void* memory, size_t bytes);

// What is going on: which thread runs (1 for the first of the grid), in which dispatch, and between which barriers.
struct Now {
    uint thread, dispatch, phase;
};
extern Now now;
constexpr uint first_phase = 1u << 31;  // dispatches count from 1

// Who touched an element in this period: a dispatch for buffers, the time between two barriers for threadgroup memory.
// Another thread may not read it then, nor write something else. Periods are that long for buffers because the barrier of
// block.sync() orders threadgroup memory alone on Metal.
struct Trace {
    uint period, writer, reader;
};
constexpr uint several = ~0u;

[[noreturn]] void race(const Trace& trace, const char* what);

inline Trace& at_present(Trace& trace, uint period) {
    if (trace.period != period) trace = {period, 0, 0};
    return trace;
}
inline void note_read(Trace& trace) {
    if (trace.writer && trace.writer != now.thread) [[unlikely]]
        race(trace, "reads what another thread has written");
    trace.reader = trace.reader == 0 || trace.reader == now.thread ? now.thread : several;
}
inline void note_write(Trace& trace, bool changes) {
    if (changes && trace.writer && trace.writer != now.thread) [[unlikely]]
        race(trace, "overwrites what another thread has written");
    if (changes && trace.reader && trace.reader != now.thread) [[unlikely]]
        race(trace, "overwrites what another thread has read");
    trace.writer = now.thread;
}

// An element of shared memory: reads and writes leave a trace. Its address, which only atomics take, does not.
template <class T>
struct Element {
    T& value;
    Trace& trace;

    operator T() const {
        note_read(trace);
        return value;
    }
    T operator=(T next) {
        note_write(trace, __builtin_memcmp(&value, &next, sizeof(T)));
        return value = next;
    }
    T operator=(const Element& other) { return *this = static_cast<T>(other); }
    T* operator&() { return &value; }
#define SHIM_COMPOUND(op) \
    T operator op##=(T operand) { return *this = static_cast<T>(static_cast<T>(*this) op operand); }
    SHIM_COMPOUND(+)
    SHIM_COMPOUND(-)
    SHIM_COMPOUND(*)
    SHIM_COMPOUND(/)
    SHIM_COMPOUND(&)
    SHIM_COMPOUND(|)
    SHIM_COMPOUND(^)
#undef SHIM_COMPOUND
};

// Stands before each buffer's first byte, so that an access can ask its size.
struct BufferHeader {
    uint64_t bytes;
    Trace* traces;  // one for each byte, of which an element uses the first
    char name[16];
};

// Replaces the `T _m0[1]` of a buffer's struct: same address, every access checked.
template <class T>
struct Buffer {
    template <class I>
    Element<T> operator[](I index) {
        const auto& header = reinterpret_cast<const BufferHeader*>(this)[-1];
        const auto at = static_cast<uint64_t>(static_cast<int64_t>(index));
        if (at >= header.bytes / sizeof(T)) [[unlikely]]
            buffer_fault(this, at, sizeof(T));
        return {reinterpret_cast<T*>(this)[at], at_present(header.traces[at * sizeof(T)], now.dispatch)};
    }
};

// Replaces `threadgroup T name[N]`: one array for all threads, poisoned at the start of each threadgroup.
template <class T, size_t N>
struct ThreadgroupArray {
    T elements[N];
    Trace traces[N];
    ThreadgroupArray() : traces{} { register_threadgroup_memory(elements, sizeof(elements)); }
    template <class I>
    Element<T> operator[](I index) {
        const auto at = static_cast<uint64_t>(static_cast<int64_t>(index));
        if (at >= N) [[unlikely]]
            fault("threadgroup array index %lld, the array has %zu elements", static_cast<long long>(at), N);
        return {elements[at], at_present(traces[at], now.phase)};
    }
};

// Binds a kernel's reference parameter to the buffer at its [[buffer(n)]] index.
struct BufferReference {
    void* base;
    template <class T>
    operator T&() const { return *static_cast<T*>(base); }
};
BufferReference bound(uint index);
// The host's write to a buffer, between dispatches.
void poke(uint index, uint64_t offset, const void* bytes, size_t n_bytes);

struct Binding {
    uint index;
    const char* buffer;
};
struct Task {
    const char* name;
    void (*run)();
    uint threads_per_group, groups, n_bindings;
    const Binding* bindings;
};
struct Root {
    const char* name;
    uint64_t bytes;
};

}  // namespace metal_shim

// Generated beside the tasks of a kernel: what to allocate, and what to dispatch in which order.
extern const metal_shim::Root shim_roots[];
extern const uint shim_n_roots;
extern const metal_shim::Task shim_tasks[];
extern const uint shim_n_tasks;

// Replaces the struct that SPIRV-Cross writes for arrays of a function: same name, every index checked.
template <class T, size_t N>
struct spvUnsafeArray {
    T elements[N ? N : 1];
    T& operator[](size_t index) {
        if (index >= N) [[unlikely]]
            metal_shim::fault("local array index %zu, the array has %zu elements", index, N);
        return elements[index];
    }
    const T& operator[](size_t index) const { return const_cast<spvUnsafeArray*>(this)->operator[](index); }
};
