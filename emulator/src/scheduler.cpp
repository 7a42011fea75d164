// Runs the threads of a block as fibers of one OS thread, each to its next barrier or warp operation. Which one goes
// on is decided by an order: forward, reverse, or random from a seed (environment variable RETAPE_EMULATOR_ORDER);
// blocks go in the same order.
//
// A thread that never waits costs no switch: when it ends, the next one that hasn't begun runs on the same fiber.
// Only under TSan each thread has a fiber of its own, which is what TSan compares.
//
// As on devices since Volta, a thread that has ended counts neither at a barrier nor in a warp operation. Stricter
// than a device: threads that meet in different lines, or with different masks that overlap, are an error; so is
// whatever nobody would ever come out of.
#include "scheduler.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <memory>
#include <numeric>
#include "faults.h"
#include "fiber.h"
#include "sanitizers.h"
#include "shared_memory.h"

namespace emulator {

__thread Thread* current = nullptr;

namespace {

enum class Order { forward, reverse, random };
struct OrderSetting {
    Order order = Order::forward;
    uint64_t seed = 1;
};
const OrderSetting& order_setting() {
    static const OrderSetting setting = [] {
        OrderSetting s;
        const char* text = getenv("RETAPE_EMULATOR_ORDER");
        if (text == nullptr || *text == 0 || strcmp(text, "forward") == 0) return s;
        if (strcmp(text, "reverse") == 0) return OrderSetting{Order::reverse, 1};
        char* end;
        s = {Order::random, strtoull(text, &end, 10)};
        if (*end != 0) {
            fprintf(stderr, "RETAPE_EMULATOR_ORDER is forward, reverse or a number, not %s\n", text);
            abort();
        }
        return s;
    }();
    return setting;
}

bool same(Place a, Place b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

std::string text(const uint3& at) {
    return "(" + std::to_string(at.x) + "," + std::to_string(at.y) + "," + std::to_string(at.z) + ")";
}
std::string text(Place at) { return std::string(at.file) + ":" + std::to_string(at.line); }

// Lanes of one warp that wait for each other.
struct Meeting {
    uint32_t mask, arrived;  // no mask: nobody waits
    Together together;
    const char* name;
    Place at;
    void* data[32];
};
struct Warp {
    uint32_t living = 0;
    Meeting meetings[32] = {};      // of disjoint masks; mostly one,
    int used = 0;                   // the first of them
    char tag[2];                    // TSan: what __syncwarp orders, in turns
    int turn = 0;
};

enum class State : uint8_t { fresh, runnable, at_barrier, in_warp, done };
struct Slot {
    State state;
    Fiber* fiber;
    Place at;
    const char* name;
};

class Scheduler {
public:
    Scheduler() { catch_faults(); }
    ~Scheduler();
    Outcome run(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, const void* parameters);
    [[noreturn]] void stop(Fault fault, const std::string& reason);
    std::string where(Place at) const;

    int barrier(bool vote, Place at);
    void meet(uint32_t mask, void* data, Together together, bool orders_memory, const char* name, Place at);

    static Fiber* self() { return reinterpret_cast<Fiber*>(current); }
    unsigned char* shared() { return shared_.data(); }

private:
    static void entry();
    [[noreturn]] void live();
    bool next_block();
    void ended(Fiber* fiber);
    void wait(Fiber* fiber, int from);
    void go(Fiber* from, int to);
    void leave(Fiber* fiber);
    void begin(Fiber* fiber, int index);
    Fiber* fresh_fiber(int index);
    int pick(int from);
    int start() const { return order_ == Order::reverse ? count_ : -1; }
    uint64_t random();
    void release_barrier();
    void complete(Meeting& meeting, int first);
    void switch_to(void** save, void** save_asan, Fiber* to);
    void arrive(void* asan);
    std::string deadlock();

    void set(int i) { ready_[i >> 6] |= uint64_t(1) << (i & 63); }
    void clear(int i) { ready_[i >> 6] &= ~(uint64_t(1) << (i & 63)); }

    // The launch.
    const Kernel* kernel_ = nullptr;
    const void* parameters_ = nullptr;
    dim3 blocks_, threads_;
    uint64_t block_count_ = 0, block_number_ = 0, block_factor_ = 1, block_offset_ = 0;
    Outcome outcome_;
    Order order_ = Order::forward;
    uint64_t random_ = 1;
    SharedMemory shared_;
    SignalStack signal_stack_;

    // The block.
    uint3 block_{};
    int count_ = 0, living_ = 0;
    std::vector<Slot> slots_;
    std::vector<uint64_t> ready_;
    std::vector<Warp> warps_;
    int waiting_ = 0, votes_ = 0, last_votes_ = 0;
    Place barrier_{};

    // Fibers: idle ones wait in `ended`. Under TSan, which takes what one fiber does for ordered, thread i has number
    // i in every second block, and i + count_ in the others.
    std::vector<std::unique_ptr<Fiber>> all_;
    std::vector<Fiber*> idle_;
    void* launcher_stack_pointer_ = nullptr;
    void* launcher_asan_ = nullptr;
    const void* launcher_bottom_ = nullptr;
    size_t launcher_size_ = 0;
    bool from_launcher_ = false;
    void* launcher_tsan_ = nullptr;

    // Tags that tell TSan what is ordered.
    char began_, finished_, again_, barrier_tag_[2];
    int barrier_turn_ = 0;
};

Scheduler& mine() {
    static thread_local Scheduler scheduler;
    return scheduler;
}

Scheduler::~Scheduler() {
    for (auto& fiber : all_) {
        if (fiber->tsan) __tsan_destroy_fiber(fiber->tsan);
        give_stack(fiber->stack);
    }
}

uint64_t Scheduler::random() {
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    return random_;
}

// The next thread that can go on, after `from` in the order; -1 where there is none.
int Scheduler::pick(int from) {
    const int words = static_cast<int>(ready_.size());
    if (order_ == Order::random) from = static_cast<int>(random() % unsigned(count_));
    if (order_ == Order::reverse) {
        const int first = from <= 0 ? count_ - 1 : from - 1;
        for (int step = 0, w = first >> 6; step <= words; step++, w = w == 0 ? words - 1 : w - 1) {
            uint64_t some = ready_[w];
            if (step == 0) some &= ~uint64_t(0) >> (63 - (first & 63));
            if (some) return 64 * w + 63 - __builtin_clzll(some);
        }
        return -1;
    }
    const int first = from + 1 >= count_ ? 0 : from + 1;
    for (int step = 0, w = first >> 6; step <= words; step++, w = w + 1 == words ? 0 : w + 1) {
        uint64_t some = ready_[w];
        if (step == 0) some &= ~uint64_t(0) << (first & 63);
        if (some) return 64 * w + __builtin_ctzll(some);
    }
    return -1;
}

// Switches.

void Scheduler::switch_to(void** save, void** save_asan, Fiber* to) {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(save_asan, to ? to->stack : launcher_bottom_, to ? STACK_BYTES : launcher_size_);
    if (with_tsan()) __tsan_switch_to_fiber(to ? to->tsan : launcher_tsan_, TSAN_NO_SYNC);
    current = to ? &to->view : nullptr;
    retape_emulator_switch(save, to ? to->stack_pointer : launcher_stack_pointer_);
}

void Scheduler::arrive(void* asan) {
    if (!__sanitizer_finish_switch_fiber) return;
    __sanitizer_finish_switch_fiber(asan, from_launcher_ ? &launcher_bottom_ : nullptr,
                                    from_launcher_ ? &launcher_size_ : nullptr);
    from_launcher_ = false;
}

void Scheduler::leave(Fiber* fiber) {
    switch_to(&fiber->stack_pointer, &fiber->asan, nullptr);
    arrive(fiber->asan);
}

Fiber* Scheduler::fresh_fiber(int index) {
    if (with_tsan()) return all_[index + (block_number_ % 2 == 0 ? count_ : 0)].get();
    if (idle_.empty()) {
        all_.push_back(std::make_unique<Fiber>());
        Fiber* fiber = all_.back().get();
        fiber->stack = take_stack();
        prepare(fiber, entry);
        return fiber;
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return fiber;
}

void Scheduler::begin(Fiber* fiber, int index) {
    fiber->index = index;
    const unsigned x = threads_.x, y = threads_.y, i = static_cast<unsigned>(index);
    const uint3 thread = i < x ? uint3{i, 0, 0} : uint3{i % x, i / x % y, i / (x * y)};
    fiber->view = {thread, block_, threads_, blocks_, index & 31};
    slots_[index].state = State::runnable;
    slots_[index].fiber = fiber;
}

// From the running fiber to thread `to`, beginning it where it hasn't begun.
void Scheduler::go(Fiber* from, int to) {
    if (slots_[to].state == State::fresh) begin(fresh_fiber(to), to);
    Fiber* next = slots_[to].fiber;
    if (next == from) return;
    switch_to(&from->stack_pointer, &from->asan, next);
    arrive(from->asan);
}

// Lets others run until this thread can go on.
void Scheduler::wait(Fiber* fiber, int from) {
    if (with_tsan()) __tsan_release(&finished_);  // for the launcher, should nobody come back here
    const int next = pick(from);
    if (next < 0) stop(Fault::failed, deadlock());
    go(fiber, next);
}

// A fiber's life: one thread after the other.
void Scheduler::entry() {
    Scheduler& scheduler = mine();
    scheduler.arrive(nullptr);
    scheduler.live();
}

void Scheduler::live() {
    Fiber* fiber = self();
    for (;;) {
        if (with_tsan()) {
            __tsan_acquire(&began_);
            __tsan_acquire(&again_);
        }
        kernel_->call(parameters_);
        if (with_tsan()) __tsan_release(&finished_);
        ended(fiber);
    }
}

// After the thread's end: comes back when this fiber has got another thread.
void Scheduler::ended(Fiber* fiber) {
    const int index = fiber->index;
    slots_[index].state = State::done;
    clear(index);
    living_--;
    fiber->copies.clear();
    Warp& warp = warps_[index >> 5];
    warp.living &= ~(1u << (index & 31));
    for (int i = 0; i < warp.used; i++) {
        Meeting& meeting = warp.meetings[i];
        if (meeting.mask == 0 || meeting.arrived != (meeting.mask & warp.living)) continue;
        complete(meeting, index & ~31);
        break;
    }
    if (living_ > 0 && waiting_ == living_) release_barrier();
    if (living_ == 0 && !next_block()) {
        if (!with_tsan()) idle_.push_back(fiber);
        leave(fiber);
        return;
    }
    const int next = pick(index);
    if (next < 0) stop(Fault::failed, deadlock());
    if (slots_[next].state == State::fresh && !with_tsan()) {
        begin(fiber, next);
    } else {
        if (!with_tsan()) idle_.push_back(fiber);
        go(fiber, next);
    }
}

// What threads do together.

void Scheduler::release_barrier() {
    for (int i = 0; i < count_; i++) {
        if (slots_[i].state != State::at_barrier) continue;
        slots_[i].state = State::runnable;
        set(i);
    }
    last_votes_ = votes_;
    waiting_ = votes_ = 0;
    barrier_turn_ ^= 1;
}

int Scheduler::barrier(bool vote, Place at) {
    Fiber* fiber = self();
    Slot& slot = slots_[fiber->index];
    if (waiting_ == 0) barrier_ = at;
    else if (!same(barrier_, at))
        stop(Fault::failed,
             "threads of a block are at different barriers: one at " + text(barrier_) + ", another " + where(at));
    char* tag = &barrier_tag_[barrier_turn_];
    if (with_tsan()) __tsan_release(tag);
    slot.state = State::at_barrier;
    slot.at = at;
    clear(fiber->index);
    waiting_++;
    votes_ += vote;
    const bool last = waiting_ == living_;
    if (last) release_barrier();
    wait(fiber, last ? start() : fiber->index);
    if (with_tsan()) __tsan_acquire(tag);
    return last_votes_;
}

// All lanes that are left have come: makes what they make together, and lets them go on.
void Scheduler::complete(Meeting& meeting, int first) {
    meeting.mask = 0;
    for (uint32_t lanes = meeting.arrived; lanes; lanes &= lanes - 1) {
        const int i = first + __builtin_ctz(lanes);
        slots_[i].state = State::runnable;
        set(i);
    }
    meeting.together(meeting.data, meeting.arrived, meeting.at);
}

void Scheduler::meet(uint32_t mask, void* data, Together together, bool orders_memory, const char* name, Place at) {
    Fiber* fiber = self();
    const int index = fiber->index, first = index & ~31;
    const uint32_t lane = 1u << (index & 31);
    Warp& warp = warps_[index >> 5];
    if ((mask & lane) == 0)
        stop(Fault::failed, std::string(name) + ": the mask leaves out a lane that calls, " + where(at));
    Meeting* found = nullptr;
    for (int i = 0; i < warp.used && found == nullptr; i++)
        if (warp.meetings[i].mask & mask) found = &warp.meetings[i];
    if (found == nullptr) {
        int free = 0;
        while (free < warp.used && warp.meetings[free].mask != 0) free++;
        if (free == warp.used) warp.used++;
        found = &warp.meetings[free];
        found->mask = mask, found->arrived = 0, found->together = together, found->name = name, found->at = at;
    }
    Meeting& meeting = *found;
    if (meeting.together != together || !same(meeting.at, at))
        stop(Fault::failed, "lanes of a warp are at different operations: one at " + std::string(meeting.name) +
                                " in " + text(meeting.at) + ", another at " + name + " " + where(at));
    if (meeting.mask != mask)
        stop(Fault::failed, std::string(name) + ": lanes of a warp give different masks, " + where(at));
    // TSan: a tag for both turns of a warp, as some may still be on their way out of the last.
    char* tag = &warp.tag[warp.turn];
    if (with_tsan() && orders_memory) __tsan_release(tag);
    meeting.data[index & 31] = data;
    meeting.arrived |= lane;
    slots_[index].state = State::in_warp;
    slots_[index].at = at;
    slots_[index].name = name;
    clear(index);
    const bool last = meeting.arrived == (mask & warp.living);
    if (last) {
        if (orders_memory) warp.turn ^= 1;
        complete(meeting, first);
    }
    wait(fiber, !last ? index : order_ == Order::reverse ? first + 32 : first - 1);
    if (with_tsan() && orders_memory) __tsan_acquire(tag);
}

// The launch.

bool Scheduler::next_block() {
    if (block_number_ > 0 && !shared_.intact())
        stop(Fault::failed, "the block wrote outside its " + std::to_string(shared_.bytes()) +
                                " bytes of shared memory, block " + text(block_));
    if (block_number_ == block_count_) return false;
    uint64_t number = block_number_++;
    if (order_ == Order::reverse) number = block_count_ - 1 - number;
    if (order_ == Order::random) number = (number * block_factor_ + block_offset_) % block_count_;
    block_ = {static_cast<unsigned>(number % blocks_.x), static_cast<unsigned>(number / blocks_.x % blocks_.y),
              static_cast<unsigned>(number / blocks_.x / blocks_.y)};
    shared_.next_block();
    if (shared_.reused()) {
        __tsan_acquire(&finished_);
        __tsan_release(&again_);
    }
    living_ = count_;
    waiting_ = votes_ = 0;
    for (int i = 0; i < count_; i++) slots_[i].state = State::fresh;
    for (size_t w = 0; w < ready_.size(); w++) {
        const int rest = count_ - static_cast<int>(64 * w);
        ready_[w] = rest >= 64 ? ~uint64_t(0) : (uint64_t(1) << rest) - 1;
    }
    for (size_t w = 0; w < warps_.size(); w++) {
        const int rest = count_ - static_cast<int>(32 * w);
        warps_[w].living = rest >= 32 ? ~uint32_t(0) : (uint32_t(1) << rest) - 1;
        for (; warps_[w].used > 0; warps_[w].used--) warps_[w].meetings[warps_[w].used - 1].mask = 0;
    }
    return true;
}

Outcome Scheduler::run(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, const void* parameters) {
    kernel_ = &kernel, parameters_ = parameters, blocks_ = blocks, threads_ = threads;
    outcome_ = {};
    order_ = order_setting().order;
    block_count_ = uint64_t(blocks.x) * blocks.y * blocks.z, block_number_ = 0;
    if (order_ == Order::random) {
        random_ = order_setting().seed * 0x9E3779B97F4A7C15u | 1;
        block_offset_ = random() % block_count_;
        do block_factor_ = 1 + random() % 0xffff; while (std::gcd(block_factor_, block_count_) != 1);
    }
    count_ = static_cast<int>(threads.x * threads.y * threads.z);
    slots_.resize(count_);
    ready_.resize((count_ + 63) / 64);
    warps_.resize((count_ + 31) / 32);
    shared_.prepare(shared_bytes);
    if (with_tsan()) {
        while (all_.size() < 2 * static_cast<size_t>(count_)) {
            all_.push_back(std::make_unique<Fiber>());
            all_.back()->stack = take_stack();
            prepare(all_.back().get(), entry);
            all_.back()->tsan = __tsan_create_fiber(0);
        }
        launcher_tsan_ = __tsan_get_current_fiber();
        __tsan_release(&began_);
    }
    next_block();
    const int first = pick(start());
    Fiber* fiber = fresh_fiber(first);
    begin(fiber, first);
    from_launcher_ = true;
    switch_to(&launcher_stack_pointer_, &launcher_asan_, fiber);
    arrive(launcher_asan_);
    if (with_tsan()) __tsan_acquire(&finished_);
    if (outcome_.fault != Fault::none) {
        // Threads were left in the middle: all fibers begin anew.
        idle_.clear();
        for (auto& one : all_) {
            prepare(one.get(), entry);
            one->copies.clear();
            if (one->tsan) {
                __tsan_destroy_fiber(one->tsan);
                one->tsan = __tsan_create_fiber(0);
            } else {
                idle_.push_back(one.get());
            }
        }
        outcome_.reason = std::string(kernel.name) + ": " + outcome_.reason;
    }
    return outcome_;
}

void Scheduler::stop(Fault fault, const std::string& reason) {
    outcome_ = {fault, reason};
    if (with_tsan()) __tsan_release(&finished_);
    leave(self());
    abort();  // nobody comes back to this fiber as it was
}

std::string Scheduler::where(Place at) const {
    const Thread& thread = self()->view;
    return "at " + text(at) + ", block " + text(thread.block) + ", thread " + text(thread.thread);
}

std::string Scheduler::deadlock() {
    int at_barrier = 0, in_warp = 0, first_at_barrier = -1, first_in_warp = -1;
    for (int i = count_ - 1; i >= 0; i--) {
        if (slots_[i].state == State::at_barrier) at_barrier++, first_at_barrier = i;
        if (slots_[i].state == State::in_warp) in_warp++, first_in_warp = i;
    }
    std::string all =
        "deadlock in block " + text(block_) + ": " + std::to_string(count_ - living_) + " threads have ended";
    if (at_barrier > 0)
        all += ", " + std::to_string(at_barrier) + " wait at a barrier (thread number " +
               std::to_string(first_at_barrier) + " at " + text(slots_[first_at_barrier].at) + ")";
    if (in_warp > 0)
        all += ", " + std::to_string(in_warp) + " wait for lanes of their warp (thread number " +
               std::to_string(first_in_warp) + " in " + slots_[first_in_warp].name + " at " +
               text(slots_[first_in_warp].at) + ")";
    return all;
}

}  // namespace

Outcome run(const Kernel& kernel, dim3 blocks, dim3 threads, size_t shared_bytes, const void* parameters) {
    return mine().run(kernel, blocks, threads, shared_bytes, parameters);
}

unsigned char* shared_memory() { return mine().shared(); }
int barrier(bool vote, Place at) { return mine().barrier(vote, at); }
void meet(uint32_t mask, void* data, Together together, bool orders_memory, const char* name, Place at) {
    mine().meet(mask, data, together, orders_memory, name, at);
}
void fail(const char* reason, Place at) {
    Scheduler& scheduler = mine();
    scheduler.stop(Fault::failed, std::string(reason) + ", " + scheduler.where(at));
}

void async_push(const AsyncCopy& copy) { Scheduler::self()->copies.copies.push_back(copy); }
void async_commit() {
    AsyncCopies& mine = Scheduler::self()->copies;
    mine.ends.push_back(mine.copies.size());
}
bool async_pop(int keep, AsyncCopy* copy) { return Scheduler::self()->copies.pop(static_cast<size_t>(keep), copy); }

void at_fault(uintptr_t address, uintptr_t instruction) {
    Scheduler& scheduler = mine();
    Dl_info library{};
    dladdr(reinterpret_cast<void*>(instruction), &library);
    const size_t offset = instruction - reinterpret_cast<uintptr_t>(library.dli_fbase);
    char text[200];
    const auto stack = reinterpret_cast<uintptr_t>(Scheduler::self()->stack);
    const char* what = "an access to where there is no memory";
    if (address == 0) what = "a misaligned vector access, or an address that can't be";
    else if (address < stack && stack - address <= STACK_GUARD) what = "a thread's stack is full";
    snprintf(text, sizeof text, "%s (address %#zx), instruction %#zx", what, static_cast<size_t>(address), offset);
    const Thread& thread = Scheduler::self()->view;
    scheduler.stop(address == 0 ? Fault::misaligned : Fault::illegal_address,
                   std::string(text) + " of " + library.dli_fname + ", block " + emulator::text(thread.block) +
                       ", thread " + emulator::text(thread.thread));
}

}  // namespace emulator
