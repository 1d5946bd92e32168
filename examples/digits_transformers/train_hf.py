"""Trains the recipe's model with the Trainer of Transformers; torchrun starts it once per process.

The Trainer keeps its checkpoints in the folder that the job names; the last whole one is where it goes on.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from recipe import Digits
from safetensors.torch import save_file
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

job = json.loads(Path(os.environ["ENGINEHOUSE_JOB"]).read_text())
output, work, config = Path(job["output"]), Path(job["work"]), job["config"]
torch.set_num_threads(config["threads"])
recipe = Digits()


def last_whole_checkpoint(folder):
    """The Trainer writes its state last of all: a checkpoint without it was cut off by a kill."""
    for found in sorted(folder.glob("checkpoint-*"), key=lambda path: -int(path.name.rpartition("-")[2])):
        try:
            json.loads((found / "trainer_state.json").read_text())
        except (FileNotFoundError, ValueError):
            continue
        return found
    return None


class WithLoss(nn.Module):
    """The Trainer wants the loss from the model's own forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values, labels=None):
        logits = self.inner(pixel_values)
        if labels is None:
            return {"logits": logits}
        return {"loss": recipe.loss({"logits": logits}, labels).mean(), "logits": logits}


class Rows(torch.utils.data.Dataset):
    """Items as the Trainer collates them: one flat dict."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        inputs, target = self.pairs[index]
        return {**inputs, "labels": target}


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs and "loss" in logs:
            metrics = {"loss": float(logs["loss"])}
            text = f"epoch {state.epoch:.0f}/{args.num_train_epochs:.0f}"
            told = {"done": state.global_step, "total": state.max_steps, "text": text, "metrics": metrics}
            print(f"::progress {json.dumps(told)}", flush=True)


world_size = int(os.environ["WORLD_SIZE"])
arguments = TrainingArguments(
    output_dir=str(work / "checkpoints"),
    num_train_epochs=config["max_epochs"],
    per_device_train_batch_size=config["batch_size"] // world_size,
    learning_rate=3e-3,
    seed=config["seed"],
    use_cpu=config["device"] == "cpu",
    save_strategy="epoch",
    save_total_limit=2,
    logging_strategy="epoch",
    report_to=[],
    disable_tqdm=True,
)
torch.manual_seed(config["seed"])
model = recipe.model()
trainer = Trainer(
    model=WithLoss(model),
    args=arguments,
    train_dataset=Rows(recipe.train_data()),
    eval_dataset=Rows(recipe.validation_data()),
    callbacks=[Told()],
)
last = last_whole_checkpoint(Path(arguments.output_dir))
if last is not None and trainer.is_world_process_zero():
    print(f"going on from {last.name}", flush=True)
trainer.train(resume_from_checkpoint=None if last is None else str(last))
answers = trainer.predict(trainer.eval_dataset)
if trainer.is_world_process_zero():
    metric = recipe.metric()
    logits = answers.predictions[0] if isinstance(answers.predictions, tuple) else answers.predictions
    metric.update({"logits": np.asarray(logits)}, np.asarray(answers.label_ids))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, output / "model.safetensors")
    (output / "metrics.json").write_text(json.dumps({"validation_accuracy": metric.result()["accuracy"]}))
trainer.accelerator.wait_for_everyone()
# Without the interpreter's orderly end, in which gloo's destructor can wait for a lock that it holds itself.
os._exit(0)
