"""What benchmarks.peers found: a table, and bars of speed, work and memory side by side."""

from typing import Any

from benchmarks.report import between, error_bars, pyplot, table

COLORS = {"plain PyTorch": "0.6", "gloo": "tab:orange", "backend": "tab:cyan", "engine": "tab:blue"}


def as_table(results: list[dict[str, Any]]) -> str:
    """Seconds are those of a step, of all ranks together; ratios are to the same over gloo."""
    head = ("images/s", "(min-max)", "CPU s", "work s", "idle s", "peak MiB", "over gloo", "(min-max)", "CPU", "work")
    rows = [("", *head, "memory")]
    for r in results:
        seconds = (f"{r[key]:.3f}" for key in ("cpu_seconds", "work_seconds", "idle_seconds"))
        cells = [
            f"{r['images_per_second']:.2f}",
            between(r, "images_per_second"),
            *seconds,
            f"{r['peak_bytes'] / 2**20:.0f}",
        ]
        if r["wrong"]:
            over = ["other loss", "-", "-", "-", "-"]
        elif r["peer"] is None:
            over = ["-"] * 5
        else:
            speed = (f"{r['over_peer_images_per_second']:.2f}", between(r, "over_peer_images_per_second"))
            rest = (f"{r[f'over_peer_{key}']:.2f}" for key in ("cpu_seconds", "work_seconds", "peak_bytes"))
            over = [*speed, *rest]
        rows.append((r["name"], *cells, *over))
    return table(rows)


def plot(results: list[dict[str, Any]], heading: str) -> Any:
    """Images/s, CPU seconds with the part that is work, and peak memory: a bar for each contestant."""
    figure, axes = pyplot().subplots(1, 3, figsize=(12, 0.32 * len(results) + 1.8), sharey=True)
    places = list(range(len(results)))
    colors = [COLORS[r["side"]] for r in results]
    style = {"error_kw": {"ecolor": "0.3"}, "capsize": 2}
    speeds = [r["images_per_second"] for r in results]
    axes[0].barh(places, speeds, xerr=error_bars(results, "images_per_second"), color=colors, **style)
    axes[0].set_xlabel("images/s (median of turns, min-max)")
    axes[1].barh(places, [r["cpu_seconds"] for r in results], color=colors, alpha=0.45)
    axes[1].barh(places, [r["work_seconds"] for r in results], color=colors)
    axes[1].set_xlabel("CPU seconds of a step, all ranks\n(full color: without waits)")
    bars = axes[2].barh(places, [r["peak_bytes"] / 2**20 for r in results], color=colors)
    axes[2].bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axes[2].set_xlabel("peak memory of the largest rank (MiB)")
    for axis in axes:
        axis.margins(x=0.12)
    axes[0].set_yticks(places, [r["name"] + (" (other loss)" if r["wrong"] else "") for r in results], fontsize=8)
    axes[0].invert_yaxis()
    figure.suptitle(heading.replace(", batch", "\nbatch"), fontsize=10)
    return figure
