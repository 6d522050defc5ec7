"""transformers' `Trainer`: `watch(trainer)` before `trainer.train()`.

Callbacks of transformers see neither the batch nor the loss function, and run after clipping. So the trainer's own
`training_step` and `compute_loss` are wrapped: the first opens a step, the second hands batch and `num_items_in_batch`
to the monitor, so that replay re-runs the same loss. Changes nothing that they compute. With `checkpoint_dir`, what the
trainer saves is noted. Flow: Trainer -> **hf** -> monitor.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor import Monitor, Step


class _Saved:
    """A checkpoint that is whole once every rank has left its save; never so where training ends before."""

    def __init__(self) -> None:
        self.whole = threading.Event()

    def result(self) -> None:
        """Waits for it, as the future of an asynchronous write would."""
        while not self.whole.wait(0.5):
            if not threading.main_thread().is_alive():  # an error or a halt ended the run: nobody will say it any more
                raise RuntimeError("the run ended before every rank had saved its part")


class Watch:
    """What `watch` hung onto a trainer. `monitor` is None until the first training step."""

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        self.monitor: Monitor | None = None
        self._trainer = trainer
        self._settings = settings
        self._step: Step | None = None
        self._training = False
        self._saved: list[_Saved] = []
        self._training_step = trainer.training_step
        self._compute_loss = trainer.compute_loss
        trainer.training_step = self._watched_step
        trainer.compute_loss = self._watched_loss
        trainer.add_callback(_callback(self))

    def _watched_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.monitor is None:
            # The optimizer under Accelerate's wrapper is the one whose `step` really runs.
            optimizer = getattr(self._trainer.optimizer, "optimizer", self._trainer.optimizer)
            scaler = getattr(self._trainer.accelerator, "scaler", None)
            self.monitor = Monitor(model, optimizer, loss_fn=self._loss, scaler=scaler, **self._settings)
        number = int(self._trainer.state.global_step) + 1
        if self._step is None or self._step.step != number:
            self.ended()
            self._step = self.monitor.step(number).__enter__()
        self._training = True
        try:
            return self._training_step(model, inputs, num_items_in_batch)
        finally:
            self._training = False

    def _watched_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **more: Any
    ) -> Any:
        watched = isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod")
        if not self._training or self._step is None or return_outputs or more or not watched:
            return self._compute_loss(
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **more
            )
        return self._step.loss((dict(inputs), num_items_in_batch))

    def _loss(self, model: Any, batch: Any) -> Any:
        inputs, num_items = batch
        return self._compute_loss(model, dict(inputs), num_items_in_batch=num_items)

    def ended(self) -> None:
        """The optimizer step is over, or the training is."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)
            self._all_saved()  # every rank took part in this step, so each has left the save before it

    def saved(self) -> None:
        """This rank has saved its part of a checkpoint; others may still be writing theirs."""
        step = int(self._trainer.state.global_step)
        if self.monitor is not None and self.monitor.checkpoint_dir and self.monitor.newest_step == step:
            self._saved.append(_Saved())
            folder = Path(self._trainer.args.output_dir) / f"checkpoint-{step}"
            self.monitor.note_checkpoint(folder, step, when=self._saved[-1])

    def _all_saved(self) -> None:
        saved, self._saved = self._saved, []
        for waiting in saved:
            waiting.whole.set()

    def close(self) -> None:
        """Ends the watch; the trainer is as it was."""
        self.ended()
        self._trainer.training_step, self._trainer.compute_loss = self._training_step, self._compute_loss
        try:
            if self.monitor is not None:
                self.monitor.close()  # waits for the last rows of all ranks: each has left its last save
        finally:
            self._all_saved()


def watch(trainer: Any, **settings: Any) -> Watch:
    """Watches one `Trainer.train()`; call it on every rank, before.

    With `checkpoint_dir`, which should be the trainer's `output_dir`, each checkpoint gets its manifest.

    Args:
        trainer: a `transformers.Trainer`, or a subclass whose loss is a function of model and inputs.
        settings: fields of `Settings`, as of `Monitor`; `resumed_from` too.

    Raises:
        ConfigurationError: the object is no trainer.
    """
    if not (
        hasattr(trainer, "training_step") and hasattr(trainer, "compute_loss") and hasattr(trainer, "add_callback")
    ):
        raise ConfigurationError(f"watch() needs a transformers.Trainer, got {type(trainer).__name__}")
    return Watch(trainer, settings)


def _callback(watched: Watch) -> Any:
    base: Any = importlib.import_module("transformers").TrainerCallback

    class SdcwatchCallback(base):  # type: ignore[misc]
        """Says when a step and when the training is over."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            watched.ended()

        def on_save(self, *_: Any, **__: Any) -> None:
            watched.saved()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            watched.close()

    return SdcwatchCallback()
