/** Races flash attention's kernels on one GPU: flash_race [-o FILE.json] [-p forward|backward] [-w WORDS]...
 * [-n] [-d].
 *
 * Each row of the table is a shape. For each pass the portable kernels and, if the GPU has them, Hopper's run
 * on poisoned outputs and scratch. Their results are compared with each other and with float64 on sampled
 * rows. The time is the median of calls in a captured graph, with the clock and the power. -w: only rows
 * whose name contains one of the WORDS, -n: no portable kernels, -d: deterministic gradients.
 *
 * A child process does the work. If a row takes longer than 10 s, the parent ends the child, notes the row as
 * hung, and starts another child with the next row. The program needs no library but the static CUDA
 * runtime. */
#include "flash_judge.cuh"

#include "kernels/flash.h"

extern "C" {
#include "device/cuda.h"
}

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

/* ---- the table ---- */

struct row {
    int64_t batch, heads, head_dim, seq;
    td_dtype dtype;
    bool causal, bshd;
};

constexpr td_dtype B = TD_BF16, H = TD_F16;
const row ROWS[] = {
    {1, 16, 64, 16384, B, true, false},   {1, 16, 128, 16384, B, true, false},
    {4, 12, 64, 512, B, true, true},      {4, 25, 64, 512, B, true, true},
    {4, 32, 80, 512, B, true, true},      {1, 1, 64, 4096, B, true, false},
    {1, 32, 128, 32768, B, true, false},  {1, 16, 64, 16384, B, false, false},
    {1, 16, 128, 16384, B, false, false}, {1, 16, 64, 4096, B, true, false},
    {1, 16, 128, 4096, B, true, false},   {1, 1, 128, 16384, B, true, false},
    {1, 16, 64, 16384, H, true, false},   {1, 1, 64, 1024, B, true, false},
    {1, 1, 32, 8192, B, true, false},     {1, 1, 16, 16384, B, true, false},
    {1, 1, 128, 65536, B, true, false},   {1, 16, 96, 16384, B, true, false},
    {4, 16, 96, 512, B, true, true},
};

constexpr int PASSES = 2, WAYS = 2; /* forward, backward; portable, Hopper */
constexpr int UNITS = (int)(sizeof ROWS / sizeof *ROWS) * PASSES * WAYS;
const char *const PASS[] = {"forward", "backward"};
const char *const WAY[] = {"portable", "hopper"};

bool deterministic; /* -d */

td_attention_shape shape_of(const row &r)
{
    td_attention_shape shape = {};

    shape.batch = r.batch;
    shape.heads = r.heads;
    shape.seq = r.seq;
    shape.seq_k = r.seq;
    shape.head_dim = r.head_dim;
    shape.dtype = r.dtype;
    shape.causal = r.causal;
    shape.scale = 1.0f / std::sqrt((float)r.head_dim);
    shape.o_bshd = r.bshd;
    shape.deterministic = deterministic;
    return shape;
}

std::string name_of(const row &r)
{
    char name[128];

    snprintf(name, sizeof name, "%" PRId64 "x%" PRId64 "x%" PRId64 " %" PRId64 " %s%s%s", r.batch, r.heads,
             r.head_dim, r.seq, r.dtype == TD_BF16 ? "bf16" : "f16", r.causal ? " causal" : "",
             r.bshd ? " bshd" : "");
    return name;
}

/* ---- a row ---- */

double relative(const std::vector<double> &x, const std::vector<double> &truth)
{
    double squares = 0, of_truth = 0;

    for (size_t i = 0; i < truth.size(); i++) {
        squares += (x[i] - truth[i]) * (x[i] - truth[i]);
        of_truth += truth[i] * truth[i];
    }
    return std::sqrt(squares / (of_truth > 0 ? of_truth : 1));
}

struct timing {
    double us = 0;
    td_gpu_clock clock = {};
};

/** The median time of a call, in a graph of at least 20. */
template <typename F> timing time_of(cudaStream_t stream, F call)
{
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cudaEvent_t begin, end;
    constexpr int CALLS = 20;
    std::vector<float> times;
    timing out;

    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < CALLS; i++)
        call();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&ready, graph, 0), "graph");
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0, runs = 4; i < runs; i++) {
        float ms;
        cudaEventRecord(begin, stream);
        check(cudaGraphLaunch(ready, stream), "graph");
        cudaEventRecord(end, stream);
        check(cudaEventSynchronize(end), "graph");
        cudaEventElapsedTime(&ms, begin, end);
        if (i > 0)
            times.push_back(ms * 1e3f / CALLS);
        else
            runs = std::clamp((int)(60 / ms), 4, 40);
    }
    for (int i = 0; i < (int)times.size(); i++)
        check(cudaGraphLaunch(ready, stream), "graph");
    td_cuda cuda = {};
    out.clock = td_cuda_clock(&cuda); /* while the graphs run */
    check(cudaStreamSynchronize(stream), "graph");
    std::sort(times.begin(), times.end());
    out.us = times[times.size() / 2];
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
    return out;
}

struct result {
    std::string name; /* the name of an output or of an identity */
    /* errors, relative L2: to float64, of the portable kernel to float64, to the portable kernel */
    double truth, judge, against;
    unsigned long long not_finite, changed; /* numbers of elements: not finite, different in two calls */
};

template <typename T> struct race {
    const row &r;
    const td_attention_shape shape = shape_of(r);
    const int64_t rows = r.batch * r.heads * r.seq, queries = rows * r.head_dim,
                  keys = r.batch * r.heads * r.seq * r.head_dim;
    block q{queries * sizeof(T)}, k{keys * sizeof(T)}, v{keys * sizeof(T)}, dout{queries * sizeof(T)},
        o{queries * sizeof(T)}, lse{rows * sizeof(float)};
    block samples_q{SAMPLES * sizeof(int2)}, samples_k{SAMPLES * sizeof(int2)};
    problem p = {};
    td_gpu portable, gpu;
    cudaStream_t stream;
    std::vector<result> results;

    race(const row &given, td_gpu on, cudaStream_t in) : r(given), portable(on), gpu(on), stream(in)
    {
        std::vector<int2> some(SAMPLES);
        const int heads = (int)(r.batch * r.heads);

        portable.capability = 80;
        fill(q, queries, 1);
        fill(k, keys, 2);
        fill(v, keys, 3);
        fill(dout, queries, 4);
        for (const bool of_keys : {false, true}) {
            const int most = (int)r.seq;
            const int edges[] = {0, 63, 64, 127, 128, 191, 192, most - 1, most - 64, most - 65};
            for (int i = 0; i < SAMPLES; i++) {
                const int row = i < 10 ? edges[i] : (int)((i * 2654435761u) % (unsigned)most);
                some[i] = make_int2(i % heads, std::clamp(row, 0, most - 1));
            }
            cudaMemcpy(of_keys ? samples_k.at : samples_q.at, some.data(), sizeof(int2) * SAMPLES,
                       cudaMemcpyHostToDevice);
        }
        p.q = q.at;
        p.k = k.at;
        p.v = v.at;
        p.dout = dout.at;
        p.o = o.at;
        p.lse = (const float *)lse.at;
        p.heads = heads;
        p.o_heads = r.bshd ? (int)r.heads : 1;
        p.seq = (int)r.seq;
        p.seq_k = (int)r.seq;
        p.head_dim = (int)r.head_dim;
        p.scale = shape.scale;
        p.causal = r.causal;
        run_forward(portable, o, lse);
    }

    void fill(block &b, int64_t count, uint32_t seed)
    {
        draw<T><<<(unsigned)((count + 255) / 256), 256, 0, stream>>>((T *)b.at, count, seed);
        check(cudaGetLastError(), "draw");
    }

    void run_forward(td_gpu on, block &to_o, block &to_lse)
    {
        block work(td_cuda_flash_forward_bytes(on, &shape));

        forward_call(on, to_o, to_lse, work);
        check(cudaStreamSynchronize(stream), "forward");
    }
    void forward_call(td_gpu on, block &to_o, block &to_lse, block &work)
    {
        check(
            td_cuda_flash_forward(stream, on, &shape, q.at, k.at, v.at, to_o.at, (float *)to_lse.at, work.at),
            "forward");
    }
    void backward_call(td_gpu on, block &dq, block &dk, block &dv, block &work)
    {
        check(td_cuda_flash_backward(stream, on, &shape, q.at, k.at, v.at, o.at, dout.at,
                                     (const float *)lse.at, dq.at, dk.at, dv.at, work.at),
              "backward");
    }

    differences between(const block &x, const block &reference, int64_t count, bool floats)
    {
        block out(sizeof(differences));
        differences d;

        cudaMemset(out.at, 0, sizeof d);
        if (floats)
            compare<<<512, 256, 0, stream>>>((const float *)x.at, (const float *)reference.at, count,
                                             (differences *)out.at);
        else
            compare<<<512, 256, 0, stream>>>((const T *)x.at, (const T *)reference.at, count,
                                             (differences *)out.at);
        check(cudaStreamSynchronize(stream), "compare");
        cudaMemcpy(&d, out.at, sizeof d, cudaMemcpyDeviceToHost);
        return d;
    }

    std::vector<double> read(const void *device, int64_t count)
    {
        std::vector<double> x(count);

        check(cudaMemcpy(x.data(), device, sizeof(double) * count, cudaMemcpyDeviceToHost), "copy");
        return x;
    }

    std::vector<double> picked(const block &tensor, bool like_o, bool of_keys)
    {
        block out(sizeof(double) * SAMPLES * r.head_dim);

        pick<T><<<SAMPLES, 128, 0, stream>>>(p, like_o, (const T *)tensor.at, of_keys ? p.seq_k : p.seq,
                                             (const int2 *)(of_keys ? samples_k : samples_q).at,
                                             (double *)out.at);
        check(cudaStreamSynchronize(stream), "pick");
        return read(out.at, SAMPLES * r.head_dim);
    }

    void judge(const char *name, const block &x, const block &again, const block &reference, int64_t count,
               const std::vector<double> &truth, bool like_o, bool of_keys)
    {
        const differences d = between(x, reference, count, false), twice = between(again, x, count, false);

        results.push_back({name, relative(picked(x, like_o, of_keys), truth),
                           relative(picked(reference, like_o, of_keys), truth),
                           std::sqrt(d.squares / (d.of_reference > 0 ? d.of_reference : 1)), d.not_finite,
                           twice.bits});
    }

    timing forward(td_gpu on)
    {
        block x(o.bytes), x_lse(lse.bytes), y(o.bytes), y_lse(lse.bytes);
        block truth_o(sizeof(double) * SAMPLES * r.head_dim), truth_dq(truth_o.bytes),
            truth_lse(sizeof(double) * SAMPLES), work(sizeof(double) * SAMPLES * 2 * r.seq);

        run_forward(on, x, x_lse);
        run_forward(on, y, y_lse);
        sample_queries<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_q.at, (double *)work.at,
                                                           (double *)truth_o.at, (double *)truth_dq.at,
                                                           (double *)truth_lse.at);
        check(cudaStreamSynchronize(stream), "sample");
        judge("o", x, y, o, queries, read(truth_o.at, SAMPLES * r.head_dim), true, false);

        const differences d = between(x_lse, lse, rows, true), twice = between(y_lse, x_lse, rows, true);
        std::vector<float> mine(rows), reference(rows);
        cudaMemcpy(mine.data(), x_lse.at, lse.bytes, cudaMemcpyDeviceToHost);
        cudaMemcpy(reference.data(), lse.at, lse.bytes, cudaMemcpyDeviceToHost);
        std::vector<int2> some(SAMPLES);
        cudaMemcpy(some.data(), samples_q.at, samples_q.bytes, cudaMemcpyDeviceToHost);
        std::vector<double> truth = read(truth_lse.at, SAMPLES), a(SAMPLES), b(SAMPLES);
        for (int i = 0; i < SAMPLES; i++) {
            a[i] = mine[(int64_t)some[i].x * r.seq + some[i].y];
            b[i] = reference[(int64_t)some[i].x * r.seq + some[i].y];
        }
        results.push_back({"lse", relative(a, truth), relative(b, truth),
                           std::sqrt(d.squares / (d.of_reference > 0 ? d.of_reference : 1)), d.not_finite,
                           twice.bits});
        block scratch(td_cuda_flash_forward_bytes(on, &shape));
        return time_of(stream, [&] { forward_call(on, x, x_lse, scratch); });
    }

    /** Returns the largest error of a head. NaN counts as the largest. */
    double2 worst_identities(const block &dq, const block &dk, const block &dv)
    {
        block out(sizeof(double2) * p.heads);
        double2 worst = {0, 0};

        identities<T><<<p.heads, THREADS, 0, stream>>>(p, (const T *)dq.at, (const T *)dk.at,
                                                       (const T *)dv.at, (double2 *)out.at);
        check(cudaStreamSynchronize(stream), "identities");
        const std::vector<double> all = read(out.at, 2 * p.heads);
        for (int i = 0; i < p.heads; i++) {
            worst.x = std::isnan(worst.x) || worst.x >= all[2 * i] ? worst.x : all[2 * i];
            worst.y = std::isnan(worst.y) || worst.y >= all[2 * i + 1] ? worst.y : all[2 * i + 1];
        }
        return worst;
    }

    timing backward(td_gpu on)
    {
        block dq(queries * sizeof(T)), dk(keys * sizeof(T)), dv(keys * sizeof(T)), dq2(dq.bytes),
            dk2(dk.bytes), dv2(dv.bytes), dq0(dq.bytes), dk0(dk.bytes), dv0(dv.bytes);
        block truth_o(sizeof(double) * SAMPLES * r.head_dim), truth_dq(truth_o.bytes),
            truth_dk(truth_o.bytes), truth_dv(truth_o.bytes), truth_lse(sizeof(double) * SAMPLES),
            work(sizeof(double) * SAMPLES * 2 * r.seq);
        block scratch(td_cuda_flash_backward_bytes(on, &shape)),
            portable_scratch(td_cuda_flash_backward_bytes(portable, &shape));

        backward_call(portable, dq0, dk0, dv0, portable_scratch);
        backward_call(on, dq, dk, dv, scratch);
        check(cudaStreamSynchronize(stream), "backward");
        scratch.poison();
        backward_call(on, dq2, dk2, dv2, scratch);
        sample_queries<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_q.at, (double *)work.at,
                                                           (double *)truth_o.at, (double *)truth_dq.at,
                                                           (double *)truth_lse.at);
        sample_keys<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_k.at, (double *)work.at,
                                                        (double *)truth_dk.at, (double *)truth_dv.at);
        check(cudaStreamSynchronize(stream), "backward");
        const int64_t count = SAMPLES * r.head_dim;
        judge("dq", dq, dq2, dq0, queries, read(truth_dq.at, count), false, false);
        judge("dk", dk, dk2, dk0, keys, read(truth_dk.at, count), false, true);
        judge("dv", dv, dv2, dv0, keys, read(truth_dv.at, count), false, true);
        const double2 mine = worst_identities(dq, dk, dv), judged = worst_identities(dq0, dk0, dv0);
        results.push_back({"<dO,O>", mine.x, judged.x, 0, 0, 0});
        results.push_back({"<dQ,Q>", mine.y, judged.y, 0, 0, 0});
        return time_of(stream, [&] { backward_call(on, dq, dk, dv, scratch); });
    }
};

/** Whether two calls may differ in this output. */
bool may_change(const result &x)
{
    return x.name == "dq" && !deterministic;
}

/** Whether an output is right. All elements are finite. The error is at most 1.5 times the portable kernel's,
 * or below the rounding of the type. Two calls give the same bits, except for dq. */
bool right(const result &x, const row &r)
{
    const double rounding = x.name == "lse" ? 1e-6 : r.dtype == TD_BF16 ? 2e-3 : 3e-4;

    if (x.not_finite || (x.changed && !may_change(x)))
        return false;
    if (x.name[0] == '<') /* 0.02 at most in rows of 512 to 16384 (H100, 2026-11-26) */
        return x.truth <= 0.1;
    return x.truth <= std::max(1.5 * x.judge, rounding);
}

/** Runs a unit. Writes a line for the table, a tab, and a line of JSON. */
void run_unit(int unit, td_gpu gpu, cudaStream_t stream)
{
    const row &r = ROWS[unit / (PASSES * WAYS)];
    const int pass = unit / WAYS % PASSES, way = unit % WAYS;
    std::vector<result> results;
    timing time;

    if (way == 0)
        gpu.capability = 80;
    const auto run = [&](auto sample) {
        race<decltype(sample)> all(r, gpu, stream);
        time = pass ? all.backward(gpu) : all.forward(gpu);
        results = all.results;
    };
    if (r.dtype == TD_BF16)
        run(__nv_bfloat16());
    else
        run(__half());

    const double pairs = (double)r.seq * r.seq / (r.causal ? 2 : 1);
    const double flop = (pass ? 10.0 : 4.0) * r.batch * r.heads * r.head_dim * pairs;
    bool good = true;
    std::string errors, json;
    char text[400];
    for (const result &x : results) {
        good = good && right(x, r);
        snprintf(text, sizeof text, " %s %.2e (%.2e, %.1e)%s", x.name.c_str(), x.truth, x.judge, x.against,
                 right(x, r)                   ? ""
                 : x.not_finite                ? " NAN"
                 : x.changed && !may_change(x) ? " CHANGES"
                                               : " WRONG");
        errors += text;
        snprintf(text, sizeof text, "%s\"%s\": {\"rel_l2\": %.3e, \"portable\": %.3e}",
                 json.empty() ? "" : ", ", x.name.c_str(), x.truth, x.judge);
        json += text;
    }
    printf("%-36s %-8s %-8s %9.1f us %5.0f TF %4d MHz %3.0f W %s%s\t", name_of(r).c_str(), PASS[pass],
           WAY[way], time.us, time.us > 0 ? flop / time.us * 1e-6 : 0, (int)time.clock.mhz, time.clock.watts,
           good ? "ok" : "FAILED", errors.c_str());
    printf(
        "{\"shape\": \"%s\", \"pass\": \"%s\", \"impl\": \"%s\", \"us\": %.2f, \"mhz\": %d, \"watts\": %.0f, "
        "\"ok\": %s, \"errors\": {%s}}\n",
        name_of(r).c_str(), PASS[pass], WAY[way], time.us, (int)time.clock.mhz, time.clock.watts,
        good ? "true" : "false", json.c_str());
    fflush(stdout);
}

/* ---- the watchdog ---- */

struct choice {
    const char *out = nullptr, *pass = nullptr;
    std::vector<const char *> words;
    bool only_hopper = false;

    bool takes(int unit) const
    {
        const std::string name = name_of(ROWS[unit / (PASSES * WAYS)]);
        const bool named = std::any_of(words.begin(), words.end(), [&](const char *some) {
            return name.find(some) != std::string::npos;
        });

        return (!pass || strcmp(pass, PASS[unit / WAYS % PASSES]) == 0) && (words.empty() || named) &&
               (unit % WAYS == 1 || !only_hopper);
    }
};

void child(int first, const choice &chosen)
{
    cudaDeviceProp properties;
    cudaStream_t stream;

    check(cudaGetDeviceProperties(&properties, 0), "device");
    check(cudaStreamCreate(&stream), "stream");
    const int sms = properties.multiProcessorCount;
    const td_gpu gpu = {sms, sms, 10 * properties.major + properties.minor};
    for (int unit = first; unit < UNITS; unit++)
        if (chosen.takes(unit)) {
            printf("%d\n", unit);
            fflush(stdout);
            run_unit(unit, gpu, stream);
        }
    _exit(0);
}

} // namespace

int main(int argc, char **argv)
{
    choice chosen;
    FILE *json = nullptr;
    int failed = 0, lines = 0;

    for (int option; (option = getopt(argc, argv, "o:p:w:nd")) != -1;)
        switch (option) {
        case 'o':
            chosen.out = optarg;
            break;
        case 'p':
            chosen.pass = optarg;
            break;
        case 'w':
            chosen.words.push_back(optarg);
            break;
        case 'n':
            chosen.only_hopper = true;
            break;
        case 'd':
            deterministic = true;
            break;
        default:
            fprintf(stderr,
                    "usage: flash_race [-o FILE.json] [-p forward|backward] [-w WORDS]... [-n] [-d]\n");
            return 2;
        }
    if (chosen.out && !(json = fopen(chosen.out, "w"))) {
        perror(chosen.out);
        return 2;
    }
    for (int next = 0; next < UNITS;) {
        int ends[2], running = -1, status;
        std::string line;

        if (pipe(ends) != 0)
            return 2;
        const pid_t worker = fork();
        if (worker == 0) {
            dup2(ends[1], 1);
            close(ends[0]);
            child(next, chosen);
        }
        close(ends[1]);
        for (bool open = true; open;) {
            pollfd wait = {ends[0], POLLIN, 0};
            char c;

            if (poll(&wait, 1, 10000) == 0) {
                printf("no answer for 10 s: ");
                break;
            }
            open = read(ends[0], &c, 1) == 1;
            if (open && c != '\n') {
                line += c;
                continue;
            }
            const size_t tab = line.find('\t');
            if (tab != std::string::npos) {
                puts(line.substr(0, tab).c_str());
                failed += line.find("FAILED") < tab;
                if (json)
                    fprintf(json, "%s%s", lines++ ? ",\n" : "[", line.substr(tab + 1).c_str());
                running = -1;
            } else if (!line.empty() && line.find_first_not_of("0123456789") == std::string::npos)
                running = atoi(line.c_str());
            else if (!line.empty())
                puts(line.c_str());
            fflush(stdout);
            line.clear();
        }
        close(ends[0]);
        kill(worker, SIGKILL);
        waitpid(worker, &status, 0);
        /* for example because there is no GPU */
        failed += WIFEXITED(status) && WEXITSTATUS(status) != 0 && running < 0;
        next = UNITS;
        if (running >= 0) {
            failed++;
            next = running + 1;
            printf("%s %s %s: no result\n", name_of(ROWS[running / (PASSES * WAYS)]).c_str(),
                   PASS[running / WAYS % PASSES], WAY[running % WAYS]);
            fflush(stdout);
        }
    }
    if (json) {
        fputs("]\n", json);
        fclose(json);
    }
    printf("%d failed\n", failed);
    return failed ? 1 : 0;
}
