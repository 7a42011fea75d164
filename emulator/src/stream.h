// Streams: work is queued, and runs, in its order, when somebody waits for it.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#include "scheduler.h"

namespace emulator {

// Work on a device: what went wrong, if something did.
using Work = std::function<Outcome()>;

// An error stays: all later work but the giving back of memory is left out, and each call on the stream tells it
// again. (On a GPU the whole context is lost; here other streams, which may be other tests, go on.)
class Stream {
public:
    explicit Stream(unsigned flags) : flags(flags) {}
    // Queues work; `retired` bytes are waiting for it to be given back. What went wrong so far.
    Outcome push(Work work, bool always = false, size_t retired = 0);
    // Runs all that is queued. What went wrong so far.
    Outcome drain();
    bool empty();

    const unsigned flags;

private:
    struct Item {
        Work work;
        bool always;  // even after an error
    };
    void drain_locked();

    std::mutex lock_;
    std::deque<Item> queue_;
    size_t retired_ = 0;
    Outcome outcome_;
};

// Handles. The null stream is handle 0, and there from the start.
Stream* add_stream(unsigned flags);
std::shared_ptr<Stream> find_stream(void* handle);
bool remove_stream(void* handle);
std::vector<std::shared_ptr<Stream>> all_streams();

}  // namespace emulator
