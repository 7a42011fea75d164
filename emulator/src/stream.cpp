#include "stream.h"
#include <stdio.h>
#include <stdlib.h>
#include <map>

namespace emulator {
namespace {

using Lock = std::lock_guard<std::mutex>;

// With so much waiting, nothing is gained by waiting longer.
constexpr size_t MOST_ITEMS = 1024, MOST_RETIRED = 64 << 20;

bool eager() {
    static const bool set = [] {
        const char* text = getenv("RETAPE_EMULATOR_EAGER");
        return text != nullptr && *text != 0 && *text != '0';
    }();
    return set;
}

struct Table {
    std::mutex lock;
    std::map<void*, std::shared_ptr<Stream>> streams{{nullptr, std::make_shared<Stream>(0)}};
};
Table& table() {
    static auto* one = new Table;
    return *one;
}

}  // namespace

Outcome Stream::push(Work work, bool always, size_t retired) {
    Lock lock(lock_);
    if (outcome_.fault != Fault::none && !always) return outcome_;
    queue_.push_back({std::move(work), always});
    retired_ += retired;
    if (eager() || queue_.size() > MOST_ITEMS || retired_ > MOST_RETIRED) drain_locked();
    return outcome_;
}

Outcome Stream::drain() {
    Lock lock(lock_);
    drain_locked();
    return outcome_;
}

void Stream::drain_locked() {
    while (!queue_.empty()) {
        Item item = std::move(queue_.front());
        queue_.pop_front();
        if (outcome_.fault != Fault::none && !item.always) continue;
        Outcome outcome = item.work();
        if (outcome.fault == Fault::none || outcome_.fault != Fault::none) continue;
        fprintf(stderr, "retape's CUDA emulator: %s\n", outcome.reason.c_str());
        outcome_ = std::move(outcome);
    }
    retired_ = 0;
}

bool Stream::empty() {
    Lock lock(lock_);
    return queue_.empty();
}

Stream* add_stream(unsigned flags) {
    auto stream = std::make_shared<Stream>(flags);
    Lock lock(table().lock);
    table().streams[stream.get()] = stream;
    return stream.get();
}

std::shared_ptr<Stream> find_stream(void* handle) {
    Lock lock(table().lock);
    auto found = table().streams.find(handle);
    return found == table().streams.end() ? nullptr : found->second;
}

bool remove_stream(void* handle) {
    std::shared_ptr<Stream> stream = find_stream(handle);
    if (handle == nullptr || stream == nullptr) return false;
    stream->drain();
    Lock lock(table().lock);
    table().streams.erase(handle);
    return true;
}

std::vector<std::shared_ptr<Stream>> all_streams() {
    Lock lock(table().lock);
    std::vector<std::shared_ptr<Stream>> all;
    for (auto& [handle, stream] : table().streams) all.push_back(stream);
    return all;
}

}  // namespace emulator
