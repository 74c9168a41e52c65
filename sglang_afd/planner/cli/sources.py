"""Where constants come from: a profile, a collection of measured steps, tables, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sglang_afd.errors import ConfigError
from sglang_afd.planner.cli import aiconfigurator
from sglang_afd.planner.fit import Fit, Observation, fit
from sglang_afd.planner.gpu import Gpu
from sglang_afd.planner.json_file import read_json
from sglang_afd.planner.profile import read_profile
from sglang_afd.planner.records import read_collection
from sglang_afd.planner.routing import Routing
from sglang_afd.planner.shape import ModelShape

# Source: docs/results/planner.md, a mode that no row shows is predicted 5 to 9 % off in the mean,
# and the form of the physics was chosen on one model and one GPU.
TRANSFER_NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class Source:
    """Times, and of what they were measured."""

    kind: str  # profile, collection, aiconfigurator or roofline
    label: str  # a line for people
    observations: tuple[Observation, ...] = ()
    shape: ModelShape | None = None  # None: of no model in particular
    gpu: Gpu | None = None
    expert_probabilities: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def fitted(self) -> Fit:
        """Constants from all times; the priors without any."""
        return _fit(self.observations)

    def routing_for(self, shape: ModelShape) -> Routing | None:
        """A measured histogram counts for its own model only."""
        is_its_own = self.shape is not None and self.shape.name == shape.name
        if not (self.expert_probabilities and is_its_own):
            return None
        return Routing(self.expert_probabilities, placed=True)

    def model_noise(self, shape: ModelShape, gpu: Gpu) -> float:
        """Added to a step's error when it is of another model or GPU than the times."""
        is_same_model = self.shape is not None and self.shape.name == shape.name
        is_same_gpu = self.gpu is not None and self.gpu.name == gpu.name
        return 0.0 if is_same_model and is_same_gpu else TRANSFER_NOISE


@lru_cache(maxsize=4)
def _fit(observations: tuple[Observation, ...]) -> Fit:
    """A program that asks several questions of one source waits for its fit once."""
    return fit(observations)


def open_file(path: Path) -> Source:
    """A profile, or a collection, by what is in the file."""
    data = read_json(path, "JSON", "--profile")
    if isinstance(data, dict) and "records" in data:
        return _collection(path)
    profile = read_profile(path)
    return Source(
        kind="profile",
        label=f"profile {path.name}: {len(profile.measurements)} times of {profile.shape.name} "
        f"on {profile.gpu.name}",
        observations=profile.observations(),
        shape=profile.shape,
        gpu=profile.gpu,
        expert_probabilities=profile.expert_probabilities,
    )


def _collection(path: Path) -> Source:
    collection = read_collection(path, strict=False)
    rows = [item.row.scenario for item in collection.rows]
    models = sorted({row.shape.name for row in rows})
    gpus = sorted({row.gpu.name for row in rows})
    return Source(
        kind="collection",
        label=f"collection {path.name}: {len(rows)} measured steps of {', '.join(models)} on "
        f"{', '.join(gpus)}",
        observations=tuple(item.observation for item in collection.rows),
        shape=rows[0].shape if len(models) == 1 else None,
        gpu=rows[0].gpu if len(gpus) == 1 else None,
        notes=(
            *(f"not read: {item.id}: {item.reason}" for item in collection.skipped),
            *(f"not read: {item.row.id}: {item.reason}" for item in collection.unmeasured),
        ),
    )


def without_a_file(wanted: str, shape: ModelShape, gpu: Gpu) -> Source:
    """Tables of aiconfigurator-core, else the roofline."""
    notes: tuple[str, ...] = ()
    if wanted != "roofline":
        try:
            tables = aiconfigurator.read_tables(shape, gpu)
        except aiconfigurator.NoTables as reason:
            if wanted == "aiconfigurator":
                raise ConfigError(f"--source aiconfigurator: {reason}") from reason
            notes = (f"aiconfigurator-core is not used: {reason}",)
        else:
            return Source(
                kind="aiconfigurator",
                label=f"{tables.version}: {len(tables.observations)} times of kernels on "
                f"{gpu.name}",
                observations=tables.observations,
                shape=shape,
                gpu=gpu,
                notes=tables.notes,
            )
    return Source(
        kind="roofline",
        label="roofline: data sheets and priors; nothing is measured",
        notes=notes,
    )
