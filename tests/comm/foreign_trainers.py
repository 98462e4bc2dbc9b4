"""One rank of a job that trains with other people's trainers over our backend: NAME; prints losses and weights."""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpi4dl.torch_backend  # noqa: F401 for the backend that it registers
from mpi4dl._torchvision import import_torchvision

SAMPLES, STEPS, RATE = 8, 4, 0.1


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def plain() -> Tensor:
    """The weights after steps on the whole batch."""
    net, (x, y) = model(), data()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def with_lightning() -> Tensor:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import MPIEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
            self.log("count", torch.tensor(len(batch[0])), sync_dist=True)
            self.log("largest", batch[0].max(), sync_dist=True, reduce_fx="max")

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    size = MPIEnvironment().world_size()
    data_set = torch.utils.data.TensorDataset(*data())
    loader = torch.utils.data.DataLoader(data_set, batch_size=SAMPLES // size)
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy=DDPStrategy(process_group_backend="mpi4dl"),
        plugins=[MPIEnvironment()],
        max_epochs=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    assert dist.get_backend() == "mpi4dl"
    assert trainer.callback_metrics["largest"] == data()[0].max()
    return nn.utils.parameters_to_vector(module.net.parameters()).detach()


def with_hugging_face() -> Tensor:
    dist.init_process_group("mpi4dl")
    from transformers import Trainer, TrainingArguments

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.net(x)
            return {"loss": nn.functional.mse_loss(y, labels), "logits": y}

    module = Module()
    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=SAMPLES // dist.get_world_size(),
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(module, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        trainer.evaluate()
    assert trainer.accelerator.num_processes == dist.get_world_size() > 1
    return nn.utils.parameters_to_vector(module.net.parameters()).detach()


TRAINERS: dict[str, Callable[[], Any]] = {"lightning": with_lightning, "transformers": with_hugging_face}


def main(name: str) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import_torchvision()
    torch.testing.assert_close(TRAINERS[name](), plain(), rtol=1e-5, atol=1e-6)
    print("as plain PyTorch", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
