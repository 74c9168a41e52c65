"""python -m sglang_afd.demo: build the embedded model and print where it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_afd.demo.ensure import build_at, default_cache_dir, refuse_foreign_files
from sglang_afd.demo.manifest import find_damage
from sglang_afd.demo.progress import ConsoleProgress
from sglang_afd.demo.recipe import Recipe
from sglang_afd.errors import AfdError, ConfigError


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    defaults = Recipe()
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m sglang_afd.demo",
        description="Build the embedded model, or find the one already built; print its directory.",
    )
    parser.add_argument(
        "--output", type=Path, help="directory to build (default: the user's cache)"
    )
    parser.add_argument(
        "--force", action="store_true", help="build anew, replacing an earlier build"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare its checksum"
    )
    parser.add_argument(
        "--num-experts", type=int, default=defaults.num_experts, help="default: %(default)s"
    )
    parser.add_argument("--top-k", type=int, default=defaults.top_k, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> Path:
    recipe = Recipe(num_experts=args.num_experts, top_k=args.top_k, seed=args.seed)
    target = args.output or default_cache_dir() / "models" / recipe.name
    if args.output is not None and args.force:
        refuse_foreign_files(target)
    may_replace = args.force or args.output is None
    directory = build_at(target, recipe, ConsoleProgress(), replace=may_replace, rebuild=args.force)
    if args.verify and (damaged := find_damage(directory)):
        raise ConfigError(
            f"{directory} is damaged in {', '.join(damaged)}; give --force to build it anew"
        )
    return directory


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        Recipe(num_experts=args.num_experts, top_k=args.top_k, seed=args.seed)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    try:
        directory = run(args)
    except AfdError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
