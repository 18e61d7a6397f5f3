"""The program `tandem` as ranks on GPUs: training steps with NCCL, and ranks that die during steps. Exits with 77 if
there are fewer than two GPUs and ranks may not share one (TD_SHARE_GPU).

Run by CTest as  python3 cli_gpus.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import os
import re
import subprocess
import sys
from unittest import mock

import cli_ranks
from cli_kit import main

SHARED = "TD_SHARE_GPU" in os.environ


def gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except OSError:
        return 0
    return listed.stdout.count("GPU ")


class OnGpus(cli_ranks.Steps):
    BACKEND = "nccl"
    MODEL = "--d-model 48 --d-ff 100 --layers 2 --heads 3 --vocab 57".split()
    MOST = 2
    LONG = "--layers 24 --batch 8 --context 512 --warmup 1 --steps 4096".split()
    OTHERS = cli_ranks.Steps.OTHERS[:2]  # the comparison of options does not depend on the device
    # Gradients that are large enough for a window.
    WIDE = (*cli_ranks.Steps.SHORT, "--d-model", "768", "--heads", "12")
    MET_S = 10.0  # until CUDA's contexts exist and NCCL has started
    BESIDE_MS = 0.01  # events of a GPU differ from the host's clock

    def on(self, rank):
        if SHARED:
            return ["--device", f"cuda:{rank % gpus()}"], {"NCCL_HOSTID": f"rank-{rank}"}
        return ["--device", "cuda"], {}

    def check_defaults(self, command, cases):
        """Checks buckets, the SMs that NCCL gets, and windows. NCCL gets a number of SMs, and windows from 2.27 on,
        only if NVLink joins the GPUs."""
        linked, direct = [], []
        for words, bucket_mb, ctas in cases:
            done = self.finish(self.start(2, command, *words, how=self.WIDE))
            self.assertEqual([(status, err) for status, _, err in done], [(0, "")] * 2)
            text = done[0][1]
            self.assertIn(f"; buckets of {bucket_mb} MiB", text)
            told = re.search(r", told to take (\d+) SMs", text)
            self.assertIn(told and int(told[1]), (ctas, None), text)
            linked += [told is not None] if ctas else []
            version = [int(part) for part in re.search(r"by nccl: NCCL (\d+)\.(\d+)", text).groups()]
            direct.append(", from GPU to GPU directly" in text)
        self.assertEqual(set(direct), {all(linked) and version >= [2, 27]})
        self.assertEqual(len(set(linked)), 1)

    def test_gradients_of_16_bits_have_defaults_of_their_own(self):
        cases = [(["--dtype", "f32"], 25, None), (["--dtype", "bf16"], 100, 24)]
        self.check_defaults("ddp", [*cases, (["--dtype", "bf16", "--ctas", "8"], 100, 8)])

    def test_state_that_is_split_flat_has_defaults_of_its_own(self):
        cases = [(["--dtype", "f32"], 25, 16), (["--dtype", "bf16_mixed"], 100, 24)]
        self.check_defaults("shard", cases)

    def test_a_captured_step_computes_what_a_queued_one_does(self):
        kinds = [(["shard", "--kind", kind], self.SHORT, {}) for kind in ("flat", "tensors", "full")]
        # Copy engines gather. NCCL captures nodes whose type the runtime cannot name.
        copied = ["shard", "--kind", "full", "--dtype", "bf16_mixed", "--ctas", "0"]
        for command, how, variables in [
            (["ddp"], self.SHORT, {}),
            *kinds,
            (copied, self.WIDE, {"NCCL_CTA_POLICY": "2"}),
        ]:
            losses = []
            for words in ([], ["--queued"]):
                with mock.patch.dict(os.environ, variables):
                    done = self.finish(self.start(2, *command, *words, how=how))
                self.assertEqual([(status, err) for status, _, err in done], [(0, "")] * 2)
                losses.append(re.search(r"loss .* to .*", done[0][1]).group())
                self.assertIn("steps are queued" if words else "steps are captured", done[0][1])
            self.assertEqual(losses[0], losses[1], command)


if __name__ == "__main__":
    if gpus() < (1 if SHARED else 2):
        print(f"skipped: {gpus()} GPUs, 2 are needed")
        sys.exit(1 if "TD_REQUIRE_GPU" in os.environ and gpus() == 0 else 77)
    main()
