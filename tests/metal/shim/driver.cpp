// Runs the tasks of one kernel as the Metal runtime of Taichi would dispatch them, on one operating system thread:
// a fibre for each thread of a threadgroup, switched only at barriers and cross-lane operations.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#ifdef SHIM_FLUSH_SUBNORMALS
#include <xmmintrin.h>
#endif

#include "runtime.h"

namespace metal_shim {

Now now = {0, 0, first_phase};

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr int poison = 0xff;  // a NaN in every float width, -1 in every signed one
constexpr uint max_buffers = 31;

enum class State { ready, at_barrier, in_simd, done };

struct Fibre {
    ucontext_t context;
    jmp_buf resume;
    bool started = false;
    State state = State::done;
    int line = 0;
    const char* operation = "";
    uint64_t deposits[2][simd_width];  // of lane 0, for its SIMD group: two turns, a lane may be one ahead
    uint turn = 0;
};

std::vector<std::unique_ptr<Fibre>> fibres;
jmp_buf scheduler;
const Task* task;
uint group, self;
void* bindings[max_buffers];
std::vector<std::pair<void*, size_t>> threadgroup_memory;

// longjmp between stacks is what makes this fast (no system call); makecontext only builds each stack once.
void fibre_main() {
    for (;;) {
        task->run();
        Fibre& me = *fibres[self];
        me.state = State::done;
        if (!_setjmp(me.resume)) _longjmp(scheduler, 1);
    }
}

__attribute__((noinline)) void resume(Fibre& fibre) {
    if (_setjmp(scheduler)) return;
    if (fibre.started) _longjmp(fibre.resume, 1);
    fibre.started = true;
    setcontext(&fibre.context);
}

__attribute__((noinline)) void wait(State state, const char* operation, int line) {
    Fibre& me = *fibres[self];
    me.state = state;
    me.operation = operation;
    me.line = line;
    if (!_setjmp(me.resume)) _longjmp(scheduler, 1);
}

void make_fibres(uint count) {
    while (fibres.size() < count) {
        auto fibre = std::make_unique<Fibre>();
        const size_t page = 1 << 14;
        auto* stack = static_cast<char*>(mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE)) fault("no memory for the stacks of %u threads", count);
        getcontext(&fibre->context);
        fibre->context.uc_stack.ss_sp = stack + page;
        fibre->context.uc_stack.ss_size = stack_bytes;
        fibre->context.uc_link = nullptr;
        makecontext(&fibre->context, fibre_main, 0);
        fibres.push_back(std::move(fibre));
    }
}

bool together(uint first, uint last, State state) {
    const Fibre& leader = *fibres[first];
    for (uint t = first; t < last; t++) {
        const Fibre& fibre = *fibres[t];
        if (fibre.state != state || fibre.line != leader.line || std::strcmp(fibre.operation, leader.operation))
            return false;
    }
    return true;
}

[[noreturn]] void divergence() {
    std::map<std::string, std::string> where;
    for (uint t = 0; t < task->threads_per_group; t++) {
        const Fibre& fibre = *fibres[t];
        const std::string place = fibre.state == State::done
                                      ? "finished"
                                      : std::string("at ") + fibre.operation + " in line " + std::to_string(fibre.line);
        where[place] += (where[place].empty() ? "" : ",") + std::to_string(t);
    }
    std::string text;
    for (const auto& [place, threads] : where)
        text += "\n  " + place + ": threads " + (threads.size() > 100 ? threads.substr(0, 100) + "..." : threads);
    self = 0;
    fault("divergent: the threads of a threadgroup (or SIMD group) must reach the same barrier or operation%s", text.c_str());
}

void run_threadgroup(const std::vector<uint>& order) {
    const uint n = task->threads_per_group;
    for (auto [memory, bytes] : threadgroup_memory) std::memset(memory, poison, bytes);
    now.phase++;
    for (uint t = 0; t < n; t++) {
        fibres[t]->state = State::ready;
        fibres[t]->turn = 0;
    }
    for (;;) {
        bool moved = false;
        uint n_done = 0;
        for (uint t : order) {
            if (fibres[t]->state == State::ready) {
                self = t;
                now.thread = group * n + t + 1;
                resume(*fibres[t]);
                moved = true;
            }
            n_done += fibres[t]->state == State::done;
        }
        if (n_done == n) return;
        for (uint first = 0; first < n; first += simd_width) {
            const uint last = std::min(first + simd_width, n);
            if (!together(first, last, State::in_simd)) continue;
            for (uint t = first; t < last; t++) fibres[t]->state = State::ready;
            moved = true;
        }
        if (together(0, n, State::at_barrier)) {
            now.phase++;
            for (uint t = 0; t < n; t++) fibres[t]->state = State::ready;
            moved = true;
        }
        if (!moved) divergence();
    }
}

struct Store {
    std::map<std::string, std::unique_ptr<char[]>> memory;
    std::map<std::string, uint64_t> sizes;
    std::map<std::string, std::unique_ptr<Trace, decltype(&std::free)>> traces;

    char* base(const std::string& name) { return memory.at(name).get() + 64; }
    void add(const std::string& name, uint64_t bytes) {
        memory[name] = std::make_unique<char[]>(bytes + 128);
        sizes[name] = bytes;
        auto* header = reinterpret_cast<BufferHeader*>(base(name)) - 1;
        header->bytes = bytes;
        header->traces = static_cast<Trace*>(std::calloc(bytes + 1, sizeof(Trace)));  // pages that are never touched cost none
        traces.emplace(name, std::unique_ptr<Trace, decltype(&std::free)>(header->traces, &std::free));
        std::snprintf(header->name, sizeof(header->name), "%s", name.c_str());
        std::memset(base(name), poison, bytes + 64);
    }
    void read(const std::string& directory, const std::string& name) {
        FILE* file = std::fopen((directory + "/" + name + ".bin").c_str(), "rb");
        if (!file) return;  // the case gives no input for it: it keeps the poison
        if (std::fread(base(name), 1, sizes[name], file) != sizes[name]) fault("%s.bin is short", name.c_str());
        std::fclose(file);
    }
    void write(const std::string& directory, const std::string& name) {
        FILE* file = std::fopen((directory + "/" + name + ".bin").c_str(), "wb");
        if (!file || std::fwrite(base(name), 1, sizes[name], file) != sizes[name])
            fault("cannot write %s.bin", name.c_str());
        std::fclose(file);
    }
};

}  // namespace

Position position_in_grid() { return {group * task->threads_per_group + self, 0, 0}; }
Position position_in_threadgroup() { return {self, 0, 0}; }
Position position_of_threadgroup() { return {group, 0, 0}; }
Position threadgroups_in_grid() { return {task->groups, 1, 1}; }
uint lane_in_simdgroup() { return self % simd_width; }
BufferReference bound(uint index) { return {bindings[index]}; }

void poke(uint index, uint64_t offset, const void* bytes, size_t n_bytes) {
    std::memcpy(static_cast<char*>(bindings[index]) + offset, bytes, n_bytes);
}

void threadgroup_wait(int line) { wait(State::at_barrier, "threadgroup_barrier", line); }

Lanes simdgroup_exchange(uint64_t bits, const char* operation, int line) {
    const uint first = self / simd_width * simd_width;
    const uint turn = fibres[self]->turn++ % 2;
    auto& deposits = fibres[first]->deposits[turn];
    deposits[self - first] = bits;
    wait(State::in_simd, operation, line);
    return {deposits, std::min(simd_width, task->threads_per_group - first), self - first};
}

void register_threadgroup_memory(void* memory, size_t bytes) {
    threadgroup_memory.emplace_back(memory, bytes);
    std::memset(memory, poison, bytes);
}

void fault(const char* format, ...) {
    if (task) std::fprintf(stderr, "%s, threadgroup %u, thread %u: ", task->name, group, self);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    std::fflush(stderr);
    _Exit(3);
}

void race(const Trace& trace, const char* what) {
    const uint n = task->threads_per_group;
    const uint other = trace.writer && trace.writer != now.thread ? trace.writer : trace.reader;
    const char* period = trace.period < first_phase ? "in the same dispatch" : "without a barrier between";
    if (other == several) fault("race: %s %s", what, period);
    fault("race: %s %s: threadgroup %u, thread %u", what, period, (other - 1) / n, (other - 1) % n);
}

void buffer_fault(const void* buffer, uint64_t index, size_t element_bytes) {
    const auto& header = static_cast<const BufferHeader*>(buffer)[-1];
    fault("buffer %s index %lld beyond its %llu elements of %zu bytes", header.name, static_cast<long long>(index),
          static_cast<unsigned long long>(header.bytes / element_bytes), element_bytes);
}

}  // namespace metal_shim

// usage: kernel INPUT_DIR OUTPUT_DIR forward|reversed
int main(int argc, char** argv) {
    using namespace metal_shim;
    if (argc != 4) fault("usage: kernel INPUT_DIR OUTPUT_DIR forward|reversed");
    const bool reversed = !std::strcmp(argv[3], "reversed");
#ifdef SHIM_FLUSH_SUBNORMALS
    _mm_setcsr(_mm_getcsr() | 0x8040);
#endif
    Store store;
    for (uint i = 0; i < shim_n_roots; i++) {
        store.add(shim_roots[i].name, shim_roots[i].bytes);
        store.read(argv[1], shim_roots[i].name);
    }
    for (uint i = 0; i < shim_n_tasks; i++) {
        const Task& next = shim_tasks[i];
        std::fill(std::begin(bindings), std::end(bindings), nullptr);
        for (uint b = 0; b < next.n_bindings; b++) bindings[next.bindings[b].index] = store.base(next.bindings[b].buffer);
        make_fibres(next.threads_per_group);
        std::vector<uint> order(next.threads_per_group);
        std::iota(order.begin(), order.end(), 0);
        if (reversed) std::reverse(order.begin(), order.end());
        task = &next;
        now.dispatch++;
        for (uint g = 0; g < next.groups; g++) {
            group = reversed ? next.groups - 1 - g : g;
            run_threadgroup(order);
        }
    }
    task = nullptr;
    for (uint i = 0; i < shim_n_roots; i++) store.write(argv[2], shim_roots[i].name);
}
