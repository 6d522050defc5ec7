"""PyTorch Lightning: `watch(trainer)` before `trainer.fit(model)`.

Lightning's callbacks see neither the loss before its backward nor the moment before `optimizer.step`, which it calls
with a closure that runs the whole step inside. So two methods of the trainer's strategy are wrapped: `training_step`
hands the batch to the monitor, and `optimizer_step` runs the closure first and then lets the optimizer step, in the
order in which torch's optimizers do it themselves. Changes nothing that they compute. Flow: Trainer -> **lightning** ->
monitor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sdcwatch.errors import ConfigurationError
from sdcwatch.monitor import Monitor, Step


class Watch:
    """What `watch` hung onto a trainer. `monitor` is None until training starts."""

    def __init__(self, trainer: Any, replay: bool, settings: dict[str, Any]) -> None:
        self.monitor: Monitor | None = None
        self._trainer = trainer
        self._replay = replay
        self._settings = settings
        self._step: Step | None = None
        self._output: Any = None
        self._training_step: Callable[..., Any] = trainer.strategy.training_step
        self._optimizer_step: Callable[..., Any] = trainer.strategy.optimizer_step
        self._save_checkpoint: Callable[..., Any] = trainer.strategy.save_checkpoint
        trainer.callbacks.append(_callback(trainer, self))

    def started(self, module: Any) -> None:
        """Model and optimizers are wrapped, and what is resumed is loaded."""
        trainer, strategy = self._trainer, self._trainer.strategy
        # A manual training_step runs backward and the optimizer itself: nothing of it may be replayed.
        replays = self._replay and module.automatic_optimization
        self.monitor = Monitor(
            strategy.model,
            max(trainer.optimizers, key=_elements),
            loss_fn=self._loss if replays else None,
            scaler=getattr(strategy.precision_plugin, "scaler", None),
            **self._settings,
        )
        strategy.optimizer_step, strategy.save_checkpoint = self._closure_first, self._noted_checkpoint
        if replays:
            strategy.training_step = self._watched_step

    def begins(self) -> None:
        """A batch begins: several of them are one step where gradients are accumulated."""
        number = int(self._trainer.global_step) + 1
        if self.monitor is not None and (self._step is None or self._step.step < number):
            self.ended()
            self._step = self.monitor.step(number).__enter__()

    def ended(self) -> None:
        """The optimizer step is over, or the training is."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def phase(self, phase: str) -> None:
        """The trainer evaluates, or trains again."""
        if self.monitor is not None:
            self.monitor.phase(phase)

    def close(self) -> None:
        """Ends the watch; the strategy is as it was."""
        self.ended()
        strategy, monitor = self._trainer.strategy, self.monitor
        strategy.training_step, strategy.optimizer_step = self._training_step, self._optimizer_step
        strategy.save_checkpoint, self.monitor = self._save_checkpoint, None
        if monitor is not None:
            monitor.close()

    def _watched_step(self, *batch: Any) -> Any:
        if self._step is None:
            return self._training_step(*batch)
        loss = self._step.loss(batch)
        output, self._output = self._output, None
        return output if isinstance(output, Mapping) else loss

    def _loss(self, model: Any, batch: tuple[Any, ...]) -> Any:
        """The live step through DDP; in a replay, of the module alone and without a trace in logs and metrics."""
        strategy = self._trainer.strategy
        if model is strategy.model:
            self._output = self._training_step(*batch)
            return _of(self._output)
        _silence(model)
        with strategy.precision_plugin.train_step_context():
            return _of(model.training_step(*batch))

    def _closure_first(self, optimizer: Any, closure: Callable[[], Any], *more: Any, **named: Any) -> Any:
        if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):  # it calls its closure repeatedly
            return self._optimizer_step(optimizer, closure, *more, **named)
        result = closure()
        return self._optimizer_step(optimizer, lambda: result, *more, **named)

    def _noted_checkpoint(self, checkpoint: Any, filepath: Any, *more: Any, **named: Any) -> Any:
        done = self._save_checkpoint(checkpoint, filepath, *more, **named)
        step = int(self._trainer.global_step)
        if self.monitor is not None and self.monitor.checkpoint_dir and self.monitor.newest_step == step:
            self.monitor.note_checkpoint(filepath, step)
        return done


def watch(trainer: Any, *, replay: bool = True, **settings: Any) -> Watch:
    """Watches one `trainer.fit(...)`; call it on every rank, before.

    With `checkpoint_dir`, what Lightning saves there (`ModelCheckpoint(dirpath=...)`) gets manifests.

    Args:
        trainer: of `lightning.pytorch` or `pytorch_lightning`, with a DDP strategy.
        replay: audits re-run `training_step` of the module alone. Its `log` calls and torchmetrics' states are kept out
            of that; False where it does anything else that must happen once.
        settings: fields of `Settings`, as of `Monitor`; `resumed_from` too.

    Raises:
        ConfigurationError: the object is no Lightning trainer.
    """
    strategy = getattr(trainer, "strategy", None)
    if not hasattr(strategy, "training_step") or not isinstance(getattr(trainer, "callbacks", None), list):
        raise ConfigurationError(f"watch() needs a Lightning Trainer, got {type(trainer).__name__}")
    return Watch(trainer, replay, settings)


def _of(output: Any) -> Any:
    return output["loss"] if isinstance(output, Mapping) else output


def _elements(optimizer: torch.optim.Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def _silence(module: Any) -> None:
    """For one replay, whose caller puts every attribute back: nothing is logged, metrics count into copies."""
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    for inner in module.modules():
        for name in getattr(inner, "_defaults", ()) if hasattr(inner, "_update_count") else ():
            state = inner.__dict__.get(name)
            if isinstance(state, torch.Tensor):
                inner.__dict__[name] = state.clone()
            elif isinstance(state, list):
                inner.__dict__[name] = list(state)


def _callback(trainer: Any, watched: Watch) -> Any:
    root = type(trainer).__module__.partition(".trainer")[0]
    base: Any = importlib.import_module(f"{root}.callbacks").Callback

    class SdcwatchCallback(base):  # type: ignore[misc]
        """Says where in the loop the trainer is."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            watched.started(pl_module)

        def on_train_batch_start(self, *_: Any) -> None:
            watched.begins()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if watched._step is not None and int(trainer.global_step) >= watched._step.step:
                watched.ended()

        def on_validation_start(self, *_: Any) -> None:
            watched.phase("evaluating")

        def on_validation_end(self, *_: Any) -> None:
            watched.phase("training")

        def on_train_end(self, *_: Any) -> None:
            watched.close()

    return SdcwatchCallback()
