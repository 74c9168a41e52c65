"""Profile: measured times of one model on one GPU type, as a file, and its fitted constants."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner import checks
from sglang_afd.planner.decode import decode
from sglang_afd.planner.deployment import Deployment, Workload
from sglang_afd.planner.fit import ROW_NOISE, Fit, Observation, fit
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.json_file import read_json
from sglang_afd.planner.routing import Routing, check_probabilities
from sglang_afd.planner.samples import ExpertSample, MemoryUse, StepSample
from sglang_afd.planner.scenario import Scenario
from sglang_afd.planner.shape import ModelShape

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One time; see fit.STAGES for the stages."""

    workload: Workload
    deployment: Deployment
    stage: str
    time_us: float
    noise: float = ROW_NOISE  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        hint = "0.03 is 3 %."
        checks.between(f"time of {self.stage}", "noise", self.noise, 1e-4, 100, hint)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What `profile` writes and everything else reads."""

    schema_version: int = SCHEMA_VERSION
    shape: ModelShape
    gpu: Gpu
    measurements: tuple[Measurement, ...]
    expert_probabilities: tuple[float, ...] = ()  # of a measured histogram; () for none
    provenance: dict[str, str]  # versions, clock, date, share of unmatched kernels
    expert_samples: tuple[ExpertSample, ...] = ()
    steps: tuple[StepSample, ...] = ()
    memory: MemoryUse | None = None

    def __post_init__(self) -> None:
        if self.expert_probabilities:
            check_probabilities(self.expert_probabilities, self.shape.experts_per_token)

    def scenario(self, workload: Workload) -> Scenario:
        """With the priors as constants; `with_constants(fitted().constants)` replaces them."""
        probabilities = self.expert_probabilities
        routing = Routing(probabilities, placed=True) if probabilities else None
        return Scenario(shape=self.shape, gpu=self.gpu, workload=workload, routing=routing)

    def observations(self) -> tuple[Observation, ...]:
        """The measurements and the calls of the experts, as a fit reads them."""
        rows = tuple(
            Observation(
                scenario=self.scenario(item.workload),
                deployment=item.deployment,
                time_us=item.time_us,
                stage=item.stage,
                noise=item.noise,
            )
            for item in self.measurements
        )
        return (*rows, *map(self._observation, self.expert_samples))

    def _observation(self, sample: ExpertSample) -> Observation:
        # The context plays no part in the time of the experts.
        scenario = self.scenario(Workload(context_tokens=1))
        return Observation(
            scenario=replace(scenario, routing=sample.routing(self.shape)),
            deployment=sample.deployment,
            time_us=sample.time_us,
            stage="experts",
            noise=sample.noise,
        )

    def fitted(self) -> Fit:
        """Constants from all measurements."""
        return fit(self.observations())


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON."""
    path.write_text(profile_text(profile), encoding="utf-8")


def profile_text(profile: Profile) -> str:
    """The JSON of a profile's file."""
    return json.dumps(asdict(profile), indent=1, default=_plain, allow_nan=False) + "\n"


def read_profile(path: Path) -> Profile:
    """Raises: ConfigError, naming what is missing, unknown or of another schema version."""
    data = read_json(path, "profile")
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: profile schema {version!r}, this planner reads {SCHEMA_VERSION}; "
            "measure the profile again"
        )
    profile = decode(Profile, data, str(path))
    assert isinstance(profile, Profile), "decode returns what it was asked for"
    if refusal := profile.provenance.get("refused"):
        raise ConfigError(f"{path}: `profile` marked it as unusable: {refusal}")
    return profile


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a profile cannot hold a {type(value).__name__}")
