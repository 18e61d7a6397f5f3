/* Gloo as an engine: the module libtandem_gloo.so, and tandem's only C++.
 *
 * No exception leaves a function that C calls. If a message is longer than its receive buffer, Gloo's own
 * thread ends the process, and no code here could catch that. This cannot happen, because ranks compare their
 * calls before Gloo gets them. A call that hangs in Gloo cannot be aborted; it ends with its own timeout. */
extern "C" {
#include "comm/engine.h"
}

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/broadcast.h>
#include <gloo/config.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

using std::chrono::milliseconds;

milliseconds of_seconds(double seconds)
{
    /* 0 would mean no timeout. */
    return milliseconds(static_cast<int64_t>(seconds * 1e3) + 1);
}

/** Exchanges the ranks' addresses over the control connections. */
class Values : public gloo::rendezvous::Store
{
  public:
    explicit Values(const td_engine_setup *setup) : setup_(setup)
    {
    }

    void set(const std::string &key, const std::vector<char> &data) override
    {
        if (setup_->put(setup_->user, ("gloo/" + key).c_str(), data.data(), data.size()) != 0)
            throw std::runtime_error("this rank's address could not be sent: " + key);
    }

    std::vector<char> get(const std::string &key) override
    {
        std::vector<char> data(32768);
        const int64_t bytes = setup_->get(setup_->user, ("gloo/" + key).c_str(), data.data(), data.size());

        if (bytes < 0)
            throw std::runtime_error("a rank's address did not come in open_seconds: " + key);
        data.resize(static_cast<size_t>(bytes));
        return data;
    }

    void wait(const std::vector<std::string> &) override
    {
        /* get() waits. */
    }

  private:
    const td_engine_setup *setup_;
};

struct Engine {
    std::shared_ptr<gloo::rendezvous::Context> context;
    std::vector<char> sums; /* scratch of reduce_scatter */
};

template <class Work> int guarded(char *text, Work work)
{
    try {
        work();
        return 0;
    } catch (const std::exception &error) {
        std::snprintf(text, TD_ENGINE_TEXT, "Gloo says %.290s", error.what());
    } catch (...) {
        std::snprintf(text, TD_ENGINE_TEXT, "Gloo failed");
    }
    return -1;
}

int open_engine(const td_engine_setup *setup, void **state, char *text)
{
    const int failed = guarded(text, [&] {
        gloo::transport::tcp::attr address;
        Values values(setup);
        auto engine = std::make_unique<Engine>();

        address.hostname = setup->ip;
        auto device = gloo::transport::tcp::CreateDevice(address);
        engine->context = std::make_shared<gloo::rendezvous::Context>(setup->rank, setup->ranks);
        engine->context->setTimeout(of_seconds(setup->seconds)); /* before the transport copies it */
        engine->context->connectFullMesh(values, device);
        std::snprintf(setup->library, 96, "Gloo %d.%d.%d", GLOO_VERSION_MAJOR, GLOO_VERSION_MINOR,
                      GLOO_VERSION_PATCH);
        *state = engine.release();
    });
    const size_t used = failed ? std::strlen(text) : 0;

    if (failed && std::strncmp(setup->ip, "fe80:", 5) == 0)
        std::snprintf(text + used, TD_ENGINE_TEXT - used,
                      "; other hosts cannot use the link-local address %s", setup->ip);
    return failed;
}

void close_engine(void *state, bool)
{
    char text[TD_ENGINE_TEXT];
    auto engine = static_cast<Engine *>(state);

    (void)guarded(text, [&] { delete engine; });
}

/** out = the reduction of in over all ranks; in may equal out. Part c of the result is
 * x_c + (x_(c+1) + (... + x_(c-1))), if x_r is part c of rank r; indices are modulo the number of ranks. */
void all_reduce(Engine *engine, const td_engine_call *call, const char *in, char *out, size_t bytes)
{
    gloo::AllreduceOptions options(engine->context);
    const int type = call->type, reduction = call->reduction;
    const size_t size = td_engine_size(type);

    options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
    auto set = [&](auto *unit) {
        using Element = std::remove_pointer_t<decltype(unit)>;

        if (in != out) /* `in` must not change */
            options.setInput(const_cast<Element *>(reinterpret_cast<const Element *>(in)), bytes / size);
        options.setOutput(reinterpret_cast<Element *>(out), bytes / size);
    };
    if (size == 8)
        set(static_cast<uint64_t *>(nullptr));
    else if (size == 4)
        set(static_cast<uint32_t *>(nullptr));
    else
        set(static_cast<uint16_t *>(nullptr));
    options.setReduceFunction([=](void *sum, const void *a, const void *b, size_t count) {
        td_engine_combine(type, reduction, static_cast<int64_t>(count), a, b, sum);
    });
    options.setTag(static_cast<uint32_t>(call->number));
    options.setTimeout(of_seconds(call->seconds));
    gloo::allreduce(options);
}

int run_call(void *state, const td_engine_call *call, char *text)
{
    return guarded(text, [&] {
        auto engine = static_cast<Engine *>(state);
        const char *in = static_cast<const char *>(call->in);
        char *out = static_cast<char *>(call->out);
        const size_t bytes = static_cast<size_t>(call->count) * td_engine_size(call->type);
        const size_t ranks = static_cast<size_t>(engine->context->size),
                     rank = static_cast<size_t>(engine->context->rank);

        switch (call->kind) {
        case TD_ENGINE_ALL_REDUCE:
            all_reduce(engine, call, in, out, bytes);
            break;
        case TD_ENGINE_REDUCE_SCATTER: /* Gloo has no reduce-scatter: reduce everything and keep a part */
            engine->sums.resize(ranks * bytes);
            all_reduce(engine, call, in, engine->sums.data(), ranks * bytes);
            std::memcpy(out, engine->sums.data() + rank * bytes, bytes);
            break;
        case TD_ENGINE_ALL_GATHER: {
            gloo::AllgatherOptions options(engine->context);

            if (in != out + rank * bytes) /* otherwise Gloo reads this rank's part from out */
                std::memcpy(out + rank * bytes, in, bytes);
            options.setOutput(out, ranks * bytes);
            options.setTag(static_cast<uint32_t>(call->number));
            options.setTimeout(of_seconds(call->seconds));
            gloo::allgather(options);
            break;
        }
        default: {
            gloo::BroadcastOptions options(engine->context);

            options.setOutput(out, bytes);
            options.setRoot(call->root);
            options.setTag(static_cast<uint32_t>(call->number));
            options.setTimeout(of_seconds(call->seconds));
            gloo::broadcast(options);
            break;
        }
        }
    });
}

} // namespace

extern "C" const td_engine *td_engine_of_module(void)
{
    static const td_engine gloo = {TD_ENGINE_VERSION, open_engine, run_call, close_engine};

    return &gloo;
}
