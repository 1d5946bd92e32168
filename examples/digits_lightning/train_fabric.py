"""Trains the recipe's model with Lightning Fabric; torchrun starts it once per process.

It keeps a checkpoint per epoch in the folder that its job names, and goes on from there when it is started again.
"""

import argparse
import json
import os
import warnings
from pathlib import Path

import torch
from lightning_fabric import Fabric
from recipe import Digits
from safetensors.torch import save_file
from torch.utils.data import DataLoader

arguments = argparse.ArgumentParser()
arguments.add_argument("--lr", type=float, default=1e-3)
lr = arguments.parse_args().lr

job = json.loads(Path(os.environ["ENGINEHOUSE_JOB"]).read_text())
output, work, config = Path(job["output"]), Path(job["work"]), job["config"]
checkpoint = work / "fabric.ckpt"

# Fabric finds torchrun's environment by itself. It knows no FSDP on CPUs; there it is DDP.
fabric = Fabric(accelerator=config["device"], strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]))
fabric.launch()
torch.set_num_threads(config["threads"])
fabric.seed_everything(config["seed"], verbose=False)

recipe = Digits()
model = recipe.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
model, optimizer = fabric.setup(model, optimizer)
batch_size = config["batch_size"] // fabric.world_size
# With DDP, Fabric gives the loader a sampler that shares the rows out.
train_rows = fabric.setup_dataloaders(DataLoader(recipe.train_data(), batch_size=batch_size, shuffle=True))
validation_rows = DataLoader(recipe.validation_data(), batch_size=256)

state = {"model": model, "optimizer": optimizer, "epoch": 0}
if checkpoint.exists():
    fabric.load(checkpoint, state)
    fabric.print(f"going on after epoch {state['epoch']}")

for epoch in range(state["epoch"], config["max_epochs"]):
    model.train()
    train_rows.sampler.set_epoch(epoch)
    torch.manual_seed(config["seed"] + 1000 * epoch + fabric.global_rank)  # dropout, the same after an interruption
    for inputs, targets in train_rows:
        loss = recipe.loss({"logits": model(**inputs)}, targets).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    state["epoch"] = epoch + 1
    # Written beside and renamed: a kill in between leaves the one before it.
    fabric.save(work / "fabric.part", state)
    if fabric.is_global_zero:
        (work / "fabric.part").rename(checkpoint)
        told = {"done": epoch + 1, "total": config["max_epochs"], "text": f"epoch {epoch + 1}", "metrics": {}}
        told["metrics"]["loss"] = float(loss)
        print(f"::progress {json.dumps(told)}", flush=True)
    fabric.barrier()

if fabric.is_global_zero:
    metric = recipe.metric()
    plain = (
        model.module.module if hasattr(model.module, "module") else model.module
    )  # out of Fabric's and DDP's wrappers
    plain.eval()
    with torch.no_grad(), warnings.catch_warnings():
        for inputs, targets in validation_rows:
            metric.update({"logits": plain(**inputs).numpy()}, targets.numpy())
    save_file(plain.state_dict(), output / "model.safetensors")
    (output / "metrics.json").write_text(json.dumps({"validation_accuracy": metric.result()["accuracy"]}))
fabric.barrier()
# Without the interpreter's orderly end, in which gloo's destructor can wait for a lock that it holds itself.
os._exit(0)
