"""Profile: measured times of one model on one GPU type, as a file, and the constants fitted to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

import msgspec

from sglang_afd.errors import ConfigError
from sglang_afd.planner.deployment import Deployment, Workload
from sglang_afd.planner.fit import Fit, Observation, fit
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.predict import Scenario
from sglang_afd.planner.routing import Routing
from sglang_afd.planner.shape import ModelShape

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One time; see fit.STAGES for the stages."""

    workload: Workload
    deployment: Deployment
    stage: str
    time_us: float
    noise: float  # standard deviation of the logarithm


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What `profile` writes and everything else reads."""

    schema_version: int = SCHEMA_VERSION
    shape: ModelShape
    gpu: Gpu
    measurements: tuple[Measurement, ...]
    expert_probabilities: tuple[float, ...] = ()  # of a measured histogram; () for none
    provenance: dict[str, str]  # versions, clock, date, share of unmatched kernels

    def scenario(self, workload: Workload) -> Scenario:
        """For predictions before `fitted`; with the priors as constants."""
        probabilities = self.expert_probabilities
        routing = Routing(probabilities, placed=True) if probabilities else None
        return Scenario(shape=self.shape, gpu=self.gpu, workload=workload, routing=routing)

    def fitted(self) -> Fit:
        """Constants from all measurements."""
        return fit(
            [
                Observation(
                    scenario=self.scenario(item.workload),
                    deployment=item.deployment,
                    time_us=item.time_us,
                    stage=item.stage,
                    noise=item.noise,
                )
                for item in self.measurements
            ]
        )


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON."""
    plain = msgspec.json.encode(asdict(profile), enc_hook=_plain)
    path.write_bytes(msgspec.json.format(plain, indent=1) + b"\n")


def read_profile(path: Path) -> Profile:
    """Raises: ConfigError, naming what is missing, unknown or of another schema version."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no readable profile ({error})") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: profile schema {version!r}, this planner reads {SCHEMA_VERSION}; "
            "measure the profile again"
        )
    try:
        return msgspec.convert(data, Profile, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; measure the profile again") from error


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a profile cannot hold a {type(value).__name__}")
