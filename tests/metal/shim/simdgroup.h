// Cross-lane operations of a SIMD group of 32: each lane brings its operand, the last to arrive releases all.
#pragma once
#include "runtime.h"

namespace metal_shim {

template <class T>
inline uint64_t to_bits(T value) {
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    return bits;
}
template <class T>
inline T from_bits(uint64_t bits) {
    T value;
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T, class F>
inline T reduce(T value, F combine, const char* operation, int line) {
    const Lanes lanes = simdgroup_exchange(to_bits(value), operation, line);
    T part[simd_width];
    for (uint i = 0; i < lanes.count; i++) part[i] = from_bits<T>(lanes.bits[i]);
    for (uint n = lanes.count; n > 1; n = (n + 1) / 2)  // a tree, as hardware would: not the order of a plain sum
        for (uint i = 0; i < n / 2; i++) part[i] = combine(part[i], part[i + (n + 1) / 2]);
    return part[0];
}

template <class T, class F>
inline T inclusive_scan(T value, F combine, const char* operation, int line) {
    const Lanes lanes = simdgroup_exchange(to_bits(value), operation, line);
    T sum = from_bits<T>(lanes.bits[0]);
    for (uint i = 1; i <= lanes.self; i++) sum = combine(sum, from_bits<T>(lanes.bits[i]));
    return sum;
}

}  // namespace metal_shim

namespace metal {

#define SHIM_REDUCE(T, name, expression)                                                                      \
    inline T name(T value, int line = __builtin_LINE()) {                                                     \
        return metal_shim::reduce(value, [](T a, T b) { return static_cast<T>(expression); }, #name, line);   \
    }
#define SHIM_SCAN(T, name, expression)                                                                              \
    inline T name(T value, int line = __builtin_LINE()) {                                                           \
        return metal_shim::inclusive_scan(value, [](T a, T b) { return static_cast<T>(expression); }, #name, line); \
    }
#define SHIM_BROADCAST(T)                                                                                   \
    inline T simd_broadcast(T value, ushort lane, int line = __builtin_LINE()) {                            \
        const auto at = metal_shim::simdgroup_exchange(lane, "simd_broadcast lane", line);                  \
        for (uint i = 0; i < at.count; i++)                                                                 \
            if (at.bits[i] != lane || lane >= at.count)                                                     \
                metal_shim::fault("simd_broadcast from lane %u, another lane asks for %u of %u", uint(lane), \
                                  uint(at.bits[i]), at.count);                                              \
        const auto lanes = metal_shim::simdgroup_exchange(metal_shim::to_bits(value), "simd_broadcast", line); \
        return metal_shim::from_bits<T>(lanes.bits[lane]);                                                  \
    }
#define SHIM_ARITHMETIC(T)                                \
    SHIM_REDUCE(T, simd_sum, a + b)                       \
    SHIM_REDUCE(T, simd_product, a * b)                   \
    SHIM_REDUCE(T, simd_min, b < a ? b : a)               \
    SHIM_REDUCE(T, simd_max, a < b ? b : a)               \
    SHIM_SCAN(T, simd_prefix_inclusive_sum, a + b)        \
    SHIM_SCAN(T, simd_prefix_inclusive_product, a * b)    \
    SHIM_BROADCAST(T)
#define SHIM_BITWISE(T)                \
    SHIM_REDUCE(T, simd_and, a & b)    \
    SHIM_REDUCE(T, simd_or, a | b)     \
    SHIM_REDUCE(T, simd_xor, a ^ b)

SHIM_ARITHMETIC(float)
SHIM_ARITHMETIC(half)
SHIM_ARITHMETIC(int)
SHIM_ARITHMETIC(uint)
SHIM_ARITHMETIC(short)
SHIM_ARITHMETIC(ushort)
SHIM_BITWISE(int)
SHIM_BITWISE(uint)

#undef SHIM_REDUCE
#undef SHIM_SCAN
#undef SHIM_BROADCAST
#undef SHIM_ARITHMETIC
#undef SHIM_BITWISE

inline bool simd_is_first(int line = __builtin_LINE()) {
    return metal_shim::simdgroup_exchange(0, "simd_is_first", line).self == 0;
}

}  // namespace metal
