"""Settings of the algorithm (rewards to advantages) and of the learner (advantages to weights), typed.

Defaults are those of MemPO as this project implements it. What the paper (arXiv 2603.00680) or its
walk-through state is marked "paper"; everything else is this project's choice. GRPO, Dr.GRPO, DAPO, GSPO,
RLOO and PPO are reached by these settings alone; the recipes show how.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Scale = Literal["std", "none"]
StdKind = Literal["sample", "population"]
OutcomeBaseline = Literal["mean", "leave_one_out", "none"]
MemoryBaseline = Literal["full", "none", "previous"]
MemoryPool = Literal["group", "turn"]
KlKind = Literal["k1", "k2", "k3"]
RatioKind = Literal["token", "sequence"]
Aggregation = Literal["token", "trajectory", "constant"]
Schedule = Literal["constant", "linear", "cosine"]


class Settings(BaseModel):
    """A table of the recipe: unknown keys are refused, field docstrings are the help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class AlgorithmConfig(Settings):
    """From rewards and memory scores to one advantage a token."""

    alpha: float = Field(default=1.0, ge=0)
    """Weight of the memory advantage on the tokens of a memory block (paper: 1; 0 is GRPO)."""
    outcome_baseline: OutcomeBaseline = "mean"
    """Subtracted from a reward: the group's mean (paper), the others' mean (RLOO), or nothing (imitation)."""
    outcome_scale: Scale = "std"
    """Divide by the group's standard deviation (paper), or not (Dr.GRPO, RLOO)."""
    memory_baseline: MemoryBaseline = "full"
    """R_M is P_mem less: P_full (paper), nothing, or P_mem of the turn before."""
    memory_pool: MemoryPool = "group"
    """Statistics of R_M over all turns of a group (paper), or over equal turn indices only."""
    memory_min_pool: int = Field(default=1, ge=1)
    """With the pool `turn`: turn indices with fewer scored memories are pooled with the one before; 1:
    never."""
    memory_scale: Scale = "std"
    """Divide by the pool's standard deviation (paper), or not."""
    std: StdKind = "sample"
    """Sample (n - 1) or population (n) standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    drop_groups_without_signal: bool = False
    """Leave out groups whose summed advantages are zero everywhere and draw others (DAPO)."""
    separate_memory_loss: bool = False
    """Two clipped losses instead of one summed advantage: what the walk-through argues against, to be
    measured."""
    advantage: Literal["group", "critic"] = "group"
    """Group-relative advantages (paper), or PPO: token-level GAE over a learned critic."""

    @model_validator(mode="after")
    def _no_setting_without_effect(self) -> AlgorithmConfig:
        if self.outcome_baseline == "none" and self.outcome_scale == "std":
            raise ValueError(
                "outcome_baseline = 'none' needs outcome_scale = 'none': there is nothing to centre"
            )
        if self.memory_min_pool > 1 and self.memory_pool == "group":
            raise ValueError("memory_min_pool has an effect only with memory_pool = 'turn'")
        if self.advantage == "critic" and self.separate_memory_loss:
            raise ValueError(
                "separate_memory_loss needs advantage = 'group': a critic's advantages are one sum"
            )
        if self.advantage == "critic" and self.drop_groups_without_signal:
            raise ValueError(
                "drop_groups_without_signal needs advantage = 'group': a critic learns from every group"
            )
        if self.separate_memory_loss and self.alpha == 0:
            raise ValueError("separate_memory_loss with alpha = 0 has no memory loss left")
        return self


class LoraConfig(Settings):
    """Low-rank adapters through `peft`; the base under them is the reference policy."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(default=32, ge=1)
    """Scaling of the adapters (their output is multiplied by alpha / rank)."""
    targets: tuple[str, ...] | str = "all-linear"
    """Module names that get adapters, or `all-linear`."""


class CriticConfig(Settings):
    """PPO only: a value network of its own, started from a copy of the policy's decoder."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critic; it follows the policy's schedule."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Decay of the generalised advantage estimate per token."""
    value_clip: float = Field(default=0.2, gt=0)
    """Range within which a new value may move from the old one before its loss stops."""
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1."""


class OptimizerConfig(Settings):
    """AdamW, or Muon on the hidden matrices with AdamW on the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: momentum orthogonalised (torch.optim.Muon); embeddings, head, norms and biases stay with
    AdamW."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of AdamW (paper: 1e-6)."""
    muon_lr: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    muon_weight_decay: float | None = Field(default=None, ge=0)
    """Decoupled weight decay of Muon's matrices; None: `weight_decay`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """AdamW's eps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices only."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    schedule: Schedule = "constant"
    """Course of the learning rate after the warm-up."""
    total_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps after which a linear or cosine schedule has reached its floor."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that a linear or cosine schedule ends at."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule = '{self.schedule}' needs total_steps")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps = {self.total_steps} must exceed warmup_steps = {self.warmup_steps}"
            )
        return self


class LearnerConfig(Settings):
    """From rows with advantages to new weights."""

    temperature: float = Field(default=1.0, gt=0)
    """Logits are divided by this, as the sampler's were."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped at 1 + clip_high (DAPO: 0.28)."""
    ratio: RatioKind = "token"
    """One ratio per token, or one per completion, the geometric mean of its tokens' (GSPO)."""
    aggregation: Aggregation = "token"
    """Mean over tokens (walk-through), over trajectories of token means (paper), or over a constant
    (Dr.GRPO)."""
    constant_length: int | None = Field(default=None, ge=1)
    """With the aggregation `constant`: tokens by which each trajectory's sum is divided."""
    kl_coef: float = Field(default=0.001, ge=0)
    """Weight of the KL to the reference policy; 0: no reference is needed."""
    kl_kind: KlKind = "k3"
    """Estimator of that KL; as a loss k1 has no expected gradient, k2 the exact one, k3 a biased one."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    old_logprobs: Literal["engine", "recomputed"] = "engine"
    """Denominator of the ratio: log-probs as the engine reported them, or computed again before the
    update."""
    importance_cap: float | None = Field(default=None, gt=0)
    """With recomputed log-probs: weight each token by min(trainer / engine probability, cap); None: do
    not."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rows of a step (paper: 1)."""
    mini_batch_questions: int | None = Field(default=None, ge=1)
    """Questions of one optimizer step; None: all of them."""
    tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Tokens of one forward and backward pass, padding included; a longer row goes alone."""
    forward: Literal["padded", "packed"] = "padded"
    """Rows of like length side by side (fast on a CPU), or all in one sequence without padding (long rows,
    GPUs)."""
    share_prompts: bool = True
    """Compute a prompt that several rows have once (only `padded`, where the model takes an explicit
    mask)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Arithmetic of the decoder; weights stay as they are, head and loss are float32 at least."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights."""
    critic: CriticConfig | None = None
    """PPO's value network; None: no value head exists."""
    max_nonfinite_steps: int = Field(default=5, ge=1)
    """The run stops after so many steps in a row whose loss or gradient was not finite."""

    @model_validator(mode="after")
    def _settings_agree(self) -> LearnerConfig:
        if (self.aggregation == "constant") != (self.constant_length is not None):
            raise ValueError("aggregation = 'constant' and constant_length go together: set both or neither")
        if self.importance_cap is not None and self.old_logprobs == "engine":
            raise ValueError(
                "importance_cap needs old_logprobs = 'recomputed': "
                "with the engine's own log-probs the ratio already corrects"
            )
        return self


def check_together(algorithm: AlgorithmConfig, learner: LearnerConfig) -> None:
    """Refuse settings of the two tables that contradict each other.

    Raises:
        ValueError: one line that names both keys.
    """
    if (algorithm.advantage == "critic") != (learner.critic is not None):
        raise ValueError(
            "algorithm.advantage = 'critic' and the table learner.critic go together: set both or neither"
        )
