"""What benchmarks.stages found: a table, bars for each size of image, and bubbles side by side."""

from typing import Any

from benchmarks.report import between, error_bars, pyplot, table

BUBBLES = (("measured_bubble", "measured", "tab:orange"), ("simulated_bubble", "simulated", "tab:blue"))


def as_table(results: list[dict[str, Any]]) -> str:
    """CPU seconds of an image; memory of the largest rank, and of it activations, in MiB."""
    speed = ("ranks", "images/s", "(min-max)", "ratio", "CPU s")
    memory = ("peak MiB", "ratio", "over least", "activations")
    rows = [(f"{results[0]['size_px']} px", *speed, *memory, "bubble %", "simulated %")]
    for r in results:
        found = (f"{r['images_per_second']:.2f}", between(r, "images_per_second"))
        peak = f"{r['peak_bytes'] / 2**20:.1f}"
        kept = "-" if r["activation_bytes"] is None else f"{r['activation_bytes'] / 2**20:.1f}"
        bubbles = ["-" if r[key] is None else f"{100 * r[key]:.1f}" for key, *_ in BUBBLES]
        over = (f"{r['memory_ratio']:.2f}", f"{r['memory_over_least']:.2f}")
        cells = [f"{r['speed_ratio']:.2f}", f"{r['cpu_seconds_per_image']:.2f}", peak, *over, kept, *bubbles]
        rows.append((r["name"], str(r["ranks"]), *found, *cells))
    return table(rows)


def plot(results: list[dict[str, Any]], heading: str) -> Any:
    """Images/s and peak memory of a rank: a group of bars for each size of image, a bar for each configuration."""
    plots = pyplot()
    names = list(dict.fromkeys(r["name"] for r in results))
    sizes = list(dict.fromkeys(r["size_px"] for r in results))
    figure, axes = plots.subplots(2, 1, figsize=(max(8.0, 0.45 * len(sizes) * (len(names) + 1)), 7.5))
    width = 0.9 / len(names)
    colors = ["0.6", *(plots.get_cmap("tab20")(2 * i % 20 + i // 10) for i in range(len(names)))]
    for number, name in enumerate(names):
        rows = [r for r in results if r["name"] == name]
        places = [sizes.index(r["size_px"]) + width * (number - (len(names) - 1) / 2) for r in rows]
        ranks = rows[0]["ranks"]
        style = {"width": 0.9 * width, "color": colors[number]}
        speeds, peaks = [r["images_per_second"] for r in rows], [r["peak_bytes"] / 2**20 for r in rows]
        error = {"yerr": error_bars(rows, "images_per_second"), "capsize": 2, "error_kw": {"ecolor": "0.3"}}
        label = f"{name} ({ranks} rank{'s' if ranks > 1 else ''})"
        bars = axes[0].bar(places, speeds, label=label, **error, **style)
        axes[0].bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
        bars = axes[1].bar(places, peaks, **style)
        axes[1].bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
        for place, r in zip(places, rows, strict=True):
            if r["activation_bytes"]:
                ends = (place - 0.45 * width, place + 0.45 * width)
                kept = axes[1].hlines(r["activation_bytes"] / 2**20, *ends, color="black", linewidth=1.5)
    kept.set_label("of it activations, kept for backward")
    axes[0].set_ylabel("images/s (median, min-max)")
    axes[1].set_ylabel("peak memory of the largest rank (MiB)")
    for axis in axes:
        axis.set_xticks(range(len(sizes)), [f"{size} x {size} px" for size in sizes])
        axis.margins(y=0.12)
    axes[0].legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=9)
    axes[1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    figure.suptitle(heading.replace(", batch", "\nbatch"), fontsize=10)
    return figure


def plot_bubbles(results: list[dict[str, Any]], heading: str) -> Any:
    """Measured beside simulated bubbles."""
    plots = pyplot()
    rows = [r for r in results if r["measured_bubble"] is not None]
    figure, axis = plots.subplots(figsize=(max(6.0, 1.2 * len(rows)), 4.5))
    for shift, (key, label, color) in zip((-0.2, 0.2), BUBBLES, strict=True):
        places = [place + shift for place in range(len(rows))]
        bars = axis.bar(places, [100 * r[key] for r in rows], width=0.38, label=label, color=color)
        axis.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axis.set_xticks(range(len(rows)), [f"{r['name'].replace(' ', chr(10))}\n{r['ranks']} ranks" for r in rows])
    axis.set_ylabel("bubble: idle share of all ranks' time (%)")
    axis.margins(y=0.12)
    axis.legend(ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    figure.suptitle(heading.replace(", batch", "\nbatch"), fontsize=10)
    return figure
