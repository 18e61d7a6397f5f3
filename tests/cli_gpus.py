"""The program `tandem` as ranks on GPUs: training steps with NCCL, and ranks that die during steps. Exits with 77 if
there are fewer than two GPUs and ranks may not share one (TD_SHARE_GPU).

Run by CTest as  python3 cli_gpus.py PATH_OF_TANDEM ; Python's standard library is all it needs.
"""

import os
import re
import subprocess
import sys

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

    def has_windows(self, record):
        """Whether NCCL got a number of SMs. It does if NVLink joins the GPUs."""
        version = [int(part) for part in record["versions"]["nccl"].split()[1].split(".")]
        return "nccl_ctas" in record and version >= [2, 27]

    def test_gradients_of_16_bits_have_defaults_of_their_own(self):
        for words in (["--dtype", "f32"], ["--dtype", "bf16"], ["--dtype", "bf16", "--ctas", "8"]):
            done = self.finish(self.start(2, "ddp", *words, "--json", str(self.json), how=self.WIDE))
            self.assertEqual([(status, err) for status, _, err in done], [(0, "")] * 2)
        records = self.records()
        self.assertEqual([record["case"]["bucket_mb"] for record in records], [25, 100, 100])
        # NCCL gets a number of SMs only if NVLink joins the GPUs.
        told = [record.get("nccl_ctas") for record in records]
        self.assertIn(told, ([None, 24, 8], [None, None, None]))
        direct = self.has_windows(records[1])
        self.assertEqual([record.get("windows") for record in records], [1 if direct else None] * 3)

    def test_state_that_is_split_flat_has_defaults_of_its_own(self):
        for words in (["--dtype", "f32"], ["--dtype", "bf16_mixed"]):
            done = self.finish(self.start(2, "shard", *words, "--json", str(self.json), how=self.WIDE))
            self.assertEqual([(status, err) for status, _, err in done], [(0, "")] * 2)
        records = self.records()
        self.assertEqual([record["case"]["bucket_mb"] for record in records], [25, 100])
        told = [record.get("nccl_ctas") for record in records]
        self.assertIn(told, ([16, 24], [None, None]))
        direct = self.has_windows(records[0])
        self.assertEqual(["windows" in record for record in records], [direct] * 2)

    def test_a_captured_step_computes_what_a_queued_one_does(self):
        kinds = (["shard", "--kind", kind] for kind in ("flat", "tensors", "full"))
        for command in (["ddp"], *kinds):
            losses = []
            for words in ([], ["--queued"]):
                done = self.finish(self.start(2, *command, *words, "--json", str(self.json)))
                self.assertEqual([(status, err) for status, _, err in done], [(0, "")] * 2)
                losses.append(re.search(r"loss .* to .*", done[0][1]).group())
            self.assertEqual(losses[0], losses[1], command)
        self.assertEqual([record["config"]["graph"] for record in self.records()], [True, False] * 4)


if __name__ == "__main__":
    if gpus() < (1 if SHARED else 2):
        print(f"skipped: {gpus()} GPUs, 2 are needed")
        sys.exit(1 if "TD_REQUIRE_GPU" in os.environ and gpus() == 0 else 77)
    main()
