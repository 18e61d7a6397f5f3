"""Files of weights from C to PyTorch and back: the safetensors package reads C's files, and C reads the package's.
TANDEM_LIBRARY names the tested library."""

import os
import tempfile
import unittest
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ref.transformer import Transformer
from tandem.library import Library, TandemError

SIZE = {"d_model": 16, "d_ff": 24, "layers": 2, "heads": 2, "vocab": 31}
BATCH, CONTEXT = 2, 8
FORMAT = {"format": "pt", "heads": "2", "rope_theta": "10000"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "bf16_mixed": torch.float32}


@unittest.skipUnless("TANDEM_LIBRARY" in os.environ, "TANDEM_LIBRARY names no library")
class Files(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.library = Library(Path(os.environ["TANDEM_LIBRARY"]))

    def setUp(self):
        self.c = self.enterContext(self.library.open())
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.folder / "w.safetensors"
        self.ids = torch.randint(SIZE["vocab"], (BATCH, CONTEXT), generator=torch.Generator().manual_seed(1))

    def config(self, precision: str):
        return self.c.struct(
            "td_transformer_config",
            size=SIZE,
            batch=BATCH,
            context=CONTEXT,
            precision=precision,
            attention="flash",
        )

    def model(self, precision: str, seed: int | None = None):
        model = self.c.create("td_transformer_create", self.c.device, self.config(precision))
        if seed is not None:
            self.c.td_transformer_init(model, seed)
        return model

    def trainer(self, precision: str, kind: str):
        hyper = self.c.struct("td_hyperparameters", sgd=self.c.struct("td_sgd", lr=0.1)[0])
        hyper.kind = self.c.enum("td_optimizer_kind", kind)
        hyper.adamw = self.c.td_adamw_defaults(self.c.TD_ADAMW_TORCH)
        model = self.config(precision)  # its strings live as long as it does
        config = self.c.struct("td_train_config", model=model[0], hyper=hyper[0])
        train = self.c.create("td_train_create", self.c.device, config)
        self.c.td_train_init(train, 5)
        return train

    def weights(self, model) -> dict[str, torch.Tensor]:
        found = {}
        for index in range(self.c.td_transformer_parameter_count(model)):
            p = self.c.value("td_transformer_parameter", model, index)
            shape = (p.rows, p.cols) if p.cols else (p.rows,)
            dtype = self.c.ffi.string(self.c.td_dtype_name(p.dtype)).decode()
            numbers = found[self.c.ffi.string(p.name).decode()] = torch.empty(shape, dtype=DTYPES[dtype])
            self.c.td_transformer_read(model, index, numbers)
        return found

    def assert_same(self, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]):
        self.assertEqual(set(got), set(want))
        for name, tensor in want.items():
            self.assertEqual(got[name].dtype, tensor.dtype, name)
            self.assertTrue(torch.equal(got[name], tensor), name)

    def reference(self, seed: int = 2) -> Transformer:
        torch.manual_seed(seed)
        return Transformer(
            d_model=SIZE["d_model"],
            d_ff=SIZE["d_ff"],
            layers=SIZE["layers"],
            heads=SIZE["heads"],
            vocab=SIZE["vocab"],
            context=CONTEXT,
        )

    def test_pytorch_reads_the_weights_that_c_writes(self):
        for precision, dtype in DTYPES.items():
            with self.subTest(precision=precision):
                model = self.model(precision, seed=3)
                self.c.td_transformer_save(model, str(self.path))
                state = load_file(self.path)
                self.assert_same(state, self.weights(model))
                reference = self.reference().to(dtype)
                reference.load_state_dict(state, strict=True)
                self.assert_same(reference.state_dict(), self.weights(model))
                with safe_open(self.path, framework="pt") as file:
                    self.assertEqual(file.metadata(), FORMAT)

    def test_the_logits_agree_with_pytorch(self):
        model = self.model("f32", seed=3)
        self.c.td_transformer_save(model, str(self.path))
        reference = self.reference()
        reference.load_state_dict(load_file(self.path), strict=True)
        logits = self.c.ffi.new("const void **")
        self.c.td_transformer_forward(model, self.ids, BATCH, CONTEXT, logits)
        got = self.c.tensor(logits[0], (BATCH, CONTEXT, SIZE["vocab"]), "f32")
        with torch.no_grad():
            want = reference.double()(self.ids)
        error = (got.double() - want).norm() / want.norm()
        self.assertTrue(error <= 1e-6, f"rel_l2 of the logits is {error}")

    def test_c_reads_the_weights_that_pytorch_writes(self):
        for precision, dtype in DTYPES.items():
            for stored in {dtype, torch.bfloat16}:
                with self.subTest(precision=precision, stored=stored):
                    state = {k: v.to(stored) for k, v in self.reference().state_dict().items()}
                    save_file(state, self.path)
                    model = self.model(precision)
                    self.c.td_transformer_load(model, str(self.path))
                    self.assert_same(self.weights(model), {k: v.to(dtype) for k, v in state.items()})

    def test_c_widens_an_odd_count_of_16_bits(self):
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):
            for count in (1, 3, 37):
                with self.subTest(dtype=dtype, count=count):
                    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
                    save_file({"x": x}, self.path)
                    file = self.c.value("td_safetensors_open", str(self.path))
                    stored, wide = torch.empty_like(x), torch.empty(count)
                    self.c.td_safetensors_read(file, 0, 0, 2 * count, stored)
                    self.c.td_safetensors_close(file)
                    self.c.td_convert(count, name, stored, "f32", wide)
                    self.assertTrue(torch.equal(wide, x.float()), wide)

    def test_float16_is_widened_and_float32_is_not_narrowed(self):
        state = {k: v.half() for k, v in self.reference().state_dict().items()}
        save_file(state, self.path)
        model = self.model("f32")
        self.c.td_transformer_load(model, str(self.path))
        self.assert_same(self.weights(model), {k: v.float() for k, v in state.items()})
        save_file(self.reference().state_dict(), self.path)
        with self.assertRaisesRegex(TandemError, "has dtype F32, which BF16 cannot hold exactly"):
            self.c.td_transformer_load(self.model("bf16"), str(self.path))

    def test_pytorch_reads_a_trainer_and_writes_one_that_c_restores(self):
        for precision, kind in (("f32", "adamw"), ("bf16_mixed", "adamw"), ("bf16", "sgd")):
            with self.subTest(precision=precision, kind=kind):
                train, other = self.trainer(precision, kind), self.trainer(precision, kind)
                for _ in range(3):
                    self.c.td_train_step(train, self.ids, self.ids, BATCH, CONTEXT)
                self.c.td_train_save(train, str(self.path))
                state = load_file(self.path)
                with safe_open(self.path, framework="pt") as file:
                    self.assertEqual(file.metadata(), FORMAT | {"optimizer": kind, "update_sms": "0"})
                self.assertEqual(state["optimizer.step"].item(), 3)
                self.assertEqual(state["optimizer.step"].dtype, torch.int64)
                weights = self.weights(self.c.td_train_model(train))
                self.assert_same({k: v for k, v in state.items() if not k.startswith("optimizer.")}, weights)
                moments = [
                    f"optimizer.{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in weights
                ]
                expected = {"optimizer.step", *(moments if kind == "adamw" else [])}
                self.assertEqual({k for k in state if k.startswith("optimizer.")}, expected)
                for name in weights if kind == "adamw" else []:
                    first, second = (
                        state[f"optimizer.{moment}.{name}"] for moment in ("exp_avg", "exp_avg_sq")
                    )
                    self.assertTrue((first < 0).any() and (second > 0).any() and (second >= 0).all(), name)

                save_file(state, self.path, metadata=FORMAT | {"optimizer": kind})
                self.c.td_train_restore(other, str(self.path))
                for _ in range(2):
                    for trainer in (train, other):
                        self.c.td_train_step(trainer, self.ids, self.ids, BATCH, CONTEXT)
                both = [self.weights(self.c.td_train_model(trainer)) for trainer in (train, other)]
                self.assert_same(*both)
                self.assertEqual(self.c.value("td_train_steps", other), 5)


if __name__ == "__main__":
    unittest.main()
