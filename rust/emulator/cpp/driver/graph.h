// Graphs: work recorded from streams with what must come before it, and replayed.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "stream.h"

namespace kvrelay_emulated {

struct Node {
    Work work;
    // Numbers of nodes that come before.
    std::vector<int> after;
};

struct Graph {
    std::vector<Node> nodes;
};

// What is being recorded, from one stream and those that join it by its events.
struct Capture {
    Graph graph;
    Stream* origin;
    // Whether it forbids, to every thread or to the one that began it, calls that it could not record.
    bool global, relaxed;
    std::thread::id begun_by;
    // A call that could not be recorded has spoilt it.
    bool invalid = false;
    // The last nodes of each stream that takes part.
    std::map<Stream*, std::vector<int>> tails;

    void record(Stream& stream, Work work);
    // Whether what other streams recorded all comes before the origin's end.
    bool joined() const;
    void end();
    // A stream that is destroyed: what was to be recorded can no longer be had.
    void lose(Stream& stream);
};

// Makes `stream` take part in the capture, after `nodes`.
void join_capture(const std::shared_ptr<Capture>& capture, Stream& stream, const std::vector<int>& nodes);

}  // namespace kvrelay_emulated
