#include "graph.h"

#include <algorithm>

#include "settings.h"

namespace kvrelay_emulated {
namespace {

enum CaptureMode : int { global_mode = 0, thread_local_mode = 1, relaxed_mode = 2 };

// Those that have begun and not ended.
struct OpenCaptures {
    std::mutex mutex;
    std::set<const Capture*> open;
};

OpenCaptures& captures() {
    static auto* all = new OpenCaptures;
    return *all;
}

std::atomic<uint64_t> num_graph_launches{0};

struct GraphExec {
    std::shared_ptr<const Graph> graph;
};

Handles<Graph>& graphs() {
    static auto* alive = new Handles<Graph>;
    return *alive;
}

Handles<GraphExec>& graph_execs() {
    static auto* alive = new Handles<GraphExec>;
    return *alive;
}

// Every node once, none before what comes before it: the first ready one, the last, or any.
void run_graph(const Graph& graph, uint64_t launch) {
    Random random(settings().seed, 2 + launch);
    std::vector<bool> done(graph.nodes.size());
    const auto is_ready = [&](size_t number) {
        const std::vector<int>& after = graph.nodes[number].after;
        return !done[number] && std::all_of(after.begin(), after.end(), [&](int one) { return done[one]; });
    };
    for (size_t turn = 0; turn < graph.nodes.size(); ++turn) {
        std::vector<size_t> ready;
        for (size_t number = 0; number < graph.nodes.size(); ++number) {
            if (is_ready(number)) {
                ready.push_back(number);
            }
        }
        const Order order = settings().order;
        const size_t chosen = order == Order::forward   ? 0
                              : order == Order::reverse ? ready.size() - 1
                                                        : random.below(ready.size());
        graph.nodes[ready[chosen]].work();
        done[ready[chosen]] = true;
    }
}

}  // namespace

void Capture::record(Stream& stream, Work work) {
    const int number = static_cast<int>(graph.nodes.size());
    graph.nodes.push_back({std::move(work), tails[&stream]});
    tails[&stream] = {number};
}

bool Capture::joined() const {
    std::set<int> before;
    std::vector<int> open = tails.at(origin);
    while (!open.empty()) {
        const int number = open.back();
        open.pop_back();
        if (before.insert(number).second) {
            const std::vector<int>& after = graph.nodes[number].after;
            open.insert(open.end(), after.begin(), after.end());
        }
    }
    return std::all_of(tails.begin(), tails.end(), [&](const auto& tail) {
        const std::vector<int>& nodes = tail.second;
        return std::all_of(nodes.begin(), nodes.end(), [&](int number) { return before.count(number) > 0; });
    });
}

void Capture::end() {
    // The streams hold it, so it must outlive the loop.
    const std::shared_ptr<Capture> self = origin->capture;
    for (const auto& [stream, nodes] : self->tails) {
        stream->capture = nullptr;
    }
    std::lock_guard<std::mutex> lock(captures().mutex);
    captures().open.erase(this);
}

void Capture::lose(Stream& stream) {
    if (&stream == origin) {
        end();
        return;
    }
    invalid = true;
    tails.erase(&stream);
    stream.capture = nullptr;
}

void join_capture(const std::shared_ptr<Capture>& capture, Stream& stream, const std::vector<int>& nodes) {
    stream.capture = capture;
    std::vector<int>& tail = capture->tails[&stream];
    for (int number : nodes) {
        if (std::find(tail.begin(), tail.end(), number) == tail.end()) {
            tail.push_back(number);
        }
    }
}

bool capture_forbids() {
    std::lock_guard<std::mutex> lock(captures().mutex);
    const auto& open = captures().open;
    return std::any_of(open.begin(), open.end(), [](const Capture* one) {
        return one->global || (!one->relaxed && one->begun_by == std::this_thread::get_id());
    });
}

}  // namespace kvrelay_emulated

using namespace kvrelay_emulated;

CUDA_API Result cuStreamBeginCapture_v2(Stream* handle, int mode) {
    return on_stream(handle, [&](Stream& stream) -> Result {
        if (handle == nullptr || stream.capturing()) {
            return capture_unsupported;
        }
        auto capture = std::make_shared<Capture>();
        capture->origin = &stream;
        capture->global = mode == global_mode;
        capture->relaxed = mode == relaxed_mode;
        capture->begun_by = std::this_thread::get_id();
        capture->tails[&stream] = {};
        stream.capture = capture;
        std::lock_guard<std::mutex> lock(captures().mutex);
        captures().open.insert(capture.get());
        return success;
    });
}

CUDA_API Result cuStreamIsCapturing(Stream* handle, int* status) {
    return on_stream(handle, [&](Stream& stream) {
        *status = !stream.capturing() ? 0 : stream.capture->invalid ? 2 : 1;
        return success;
    });
}

CUDA_API Result cuStreamEndCapture(Stream* handle, Graph** graph) {
    return on_stream(handle, [&](Stream& stream) -> Result {
        *graph = nullptr;
        if (!stream.capturing() || stream.capture->origin != &stream) {
            return capture_unmatched;
        }
        const std::shared_ptr<Capture> capture = stream.capture;
        capture->end();
        if (capture->invalid) {
            return capture_invalidated;
        }
        if (!capture->joined()) {
            return capture_unjoined;
        }
        *graph = graphs().add(new Graph(std::move(capture->graph)));
        return success;
    });
}

CUDA_API Result cuGraphInstantiateWithFlags(GraphExec** exec, Graph* graph, unsigned long long) {
    return in_context([&](Context&) {
        if (!graphs().has(graph)) {
            return invalid_value;
        }
        *exec = graph_execs().add(new GraphExec{std::make_shared<const Graph>(*graph)});
        return success;
    });
}

// A graph of another shape is refused, and the executable stays as it was.
CUDA_API Result cuGraphExecUpdate_v2(GraphExec* exec, Graph* graph, void*) {
    return in_context([&](Context&) {
        if (!graph_execs().has(exec) || !graphs().has(graph)) {
            return invalid_value;
        }
        const auto same = [](const Node& a, const Node& b) { return a.after == b.after; };
        const std::vector<Node>&before = exec->graph->nodes, &after = graph->nodes;
        if (!std::equal(before.begin(), before.end(), after.begin(), after.end(), same)) {
            return graph_update_failure;
        }
        exec->graph = std::make_shared<const Graph>(*graph);
        return success;
    });
}

CUDA_API Result cuGraphUpload(GraphExec* exec, Stream* handle) {
    return on_stream(handle, [&](Stream&) { return graph_execs().has(exec) ? success : invalid_value; });
}

CUDA_API Result cuGraphLaunch(GraphExec* exec, Stream* handle) {
    return on_stream(handle, [&](Stream& stream) -> Result {
        if (!graph_execs().has(exec)) {
            return invalid_value;
        }
        if (stream.capturing()) {
            return not_supported;
        }
        const uint64_t launch = num_graph_launches++;
        stream.enqueue([graph = exec->graph, launch] { run_graph(*graph, launch); });
        return success;
    });
}

CUDA_API Result cuGraphGetNodes(Graph* graph, void**, size_t* count) {
    return in_driver([&] {
        if (!graphs().has(graph)) {
            return invalid_value;
        }
        *count = graph->nodes.size();
        return success;
    });
}

CUDA_API Result cuGraphExecDestroy(GraphExec* exec) {
    return in_driver([&] {
        const bool known = graph_execs().remove(exec);
        delete (known ? exec : nullptr);
        return known ? success : invalid_value;
    });
}

CUDA_API Result cuGraphDestroy(Graph* graph) {
    return in_driver([&] {
        const bool known = graphs().remove(graph);
        delete (known ? graph : nullptr);
        return known ? success : invalid_value;
    });
}
