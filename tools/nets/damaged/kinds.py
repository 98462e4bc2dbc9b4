"""Intact files of every kind that others may hand over, how training and prediction read them, and odd ones by hand."""

import gzip
import json
import os
import struct
import warnings
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import PIL.Image
import safetensors.torch
import tifffile
import torch
from pydicom.uid import JPEGBaseline8Bit

from mpi4dl.checkpoints.weights import open_weights
from mpi4dl.datasets.kinds import SLIDES
from mpi4dl.datasets.samples import Sample, read_samples, read_split_file
from mpi4dl.datasets.slides.compose import APERIO
from mpi4dl.datasets.slides.dataset import SlideOptions
from mpi4dl.datasets.slides.features import Embedded, FeatureFolder, open_bag, write_features
from mpi4dl.datasets.slides.masks import MaskOptions, SlideMasks
from mpi4dl.datasets.slides.slide import Level, Resolution, Slide, SlideFile, open_slide
from mpi4dl.datasets.slides.tissue import find_tissue
from mpi4dl.datasets.split import split_rows
from mpi4dl.geometry import Interval
from mpi4dl.inference.maps import PatchMap, geojson, grid_of
from mpi4dl.options.config import Config, ConfigError, parse, to_toml
from mpi4dl.results.job import FolderJob
from mpi4dl.results.names import PREDICTIONS
from mpi4dl.runs.description import Description
from mpi4dl.runs.samples import FILE as SAMPLES
from mpi4dl.runs.samples import RunSamples
from tests.datasets.boxes import smooth_image
from tests.datasets.slides.dicom import series

Write = Callable[[Path], None]
Change = Callable[[bytes, np.random.Generator], bytes]
SIDE = 256  # px, of slides
COUNT = 12  # slides of tables
MOST_ROWS = 4096  # of features


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, what writes an intact one, and what reads it as training and prediction do.

    `text`: it is text. `odd` are files by hand, each by its name.
    """

    name: str
    write: Write
    read: Callable[[Path], Any]
    text: bool = False
    odd: Mapping[str, Write] | None = None


# Slides


def _pyramid(path: Path, **more: Any) -> None:
    pixels = smooth_image(SIDE, SIDE)
    options = {"photometric": "rgb", "compression": "jpeg", "tile": (64, 64), "resolutionunit": 3}
    with tifffile.TiffWriter(path, ome=path.name.endswith(".ome.tif")) as file:
        file.write(pixels, subifds=more.pop("subifds", 0), resolution=(20_000, 20_000), **options, **more)
        below = {"subfiletype": 1} if path.name.endswith(".ome.tif") else {}
        file.write(pixels[::4, ::4], resolution=(5_000, 5_000), **options, **below)


def _svs(path: Path) -> None:
    said = APERIO.format(width=SIDE, height=SIDE, tile=64, power=20, mpp=0.5)
    _pyramid(path, description=said, metadata=None)


def _dicom(path: Path, **how: Any) -> None:
    """The finest level of a slide, beside the other."""
    pixels = smooth_image(SIDE, SIDE)
    levels = [pixels, np.ascontiguousarray(pixels[::4, ::4])]
    series(path.parent, levels, **how)[0].replace(path)


def _picture(path: Path) -> None:
    PIL.Image.fromarray(smooth_image(SIDE, SIDE)).save(path)


def read_slide(path: Path) -> None:
    slide = open_slide(path)
    shares = find_tissue(slide).shares(slide, 64)
    assert shares.ndim == 2
    height, width = slide.size
    for top, left in ((0, 0), (max(0, height - 40), max(0, width - 30)), (height // 2, width // 2)):
        box = Interval(top, min(top + 40, height)), Interval(left, min(left + 30, width))
        assert slide.read(*box).shape == (box[0].length, box[1].length, 3)
    coarse = open_slide(path, Resolution(mpp=1.3, assumed_mpp=0.5))
    coarse.read(*(Interval(0, min(50, side)) for side in coarse.size))


class _Glass:
    size = (SIDE, SIDE)

    def read(self, *space: Interval) -> Any:
        return np.full((*(interval.length for interval in space), 3), 255, np.uint8)


GLASS = Slide(SlideFile(Path("glass.tif"), (Level(_Glass(), 1.0),), 0.5))


# Tables


def _slides_beside(folder: Path) -> None:
    for number in range(COUNT):
        (folder / f"s{number}.svs").touch()


def _table(path: Path) -> None:
    _slides_beside(path.parent)
    lines = ["slide_id,case_id,label,time,event,mpp,fold"]
    lines += [
        f's{n},"00{n // 2}",{"1_1" if n % 4 < 2 else "1e5"},{n}.5,{n % 2},0.25,{n // 2 % 3}' for n in range(COUNT)
    ]
    path.write_text("\n".join(lines) + "\n")


def read_table(path: Path) -> None:
    for how in ({"task": "classify"}, {"task": "survival"}, {"label_columns": ()}):
        found = read_samples(path, SLIDES, **how)
        if found.task is not None:
            how = {"fraction": 0.25, "seed": 0, "table": path}
            split_rows(found.rows, found.task, found.classes, **how)
            split_rows(found.rows, found.task, found.classes, **how, folds=3, fold=1)


def _split(path: Path) -> None:
    _slides_beside(path.parent)
    path.write_text(
        ",train,val,test\n" + "".join(f"{n},s{n},s{n + 5},s{n + 9}\n" for n in range(3)) + "3,s3,,\n4,s4,,\n"
    )


def read_split(path: Path) -> None:
    rows = tuple(Sample(n + 2, f"s{n}", f"s{n}.svs", f"p{n}", label=n % 2) for n in range(COUNT))
    read_split_file(path)
    split_rows(rows, "classify", ("a", "b"), fraction=0.25, seed=0, split_file=path)


# Annotations


def geojson_content() -> Any:
    ring = [[10.0, 10.0], [200.5, 12.0], [180.0, 220.0], [15.0, 150.0], [10.0, 10.0]]
    hole = [[50, 50], [60, 50], [60, 60], [50, 50]]
    properties = {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}}
    many = {"type": "MultiPolygon", "coordinates": [[ring], [hole]]}
    geometries = [{"type": "Polygon", "coordinates": [ring, hole]}, many, {"type": "Point", "coordinates": [1, 2]}]
    features = [{"type": "Feature", "id": "x", "geometry": each, "properties": properties} for each in geometries]
    return {"type": "FeatureCollection", "features": features}


def _asap(path: Path) -> None:
    corners = "".join(f'<Coordinate Order="{n}" X="{10 + 40 * n}.5" Y="{20 + 30 * n * n}"/>' for n in range(4))
    one = f'<Annotation Name="A" Type="Polygon" PartOfGroup="Tumor" Color="#F4FA58"><Coordinates>{corners}'
    whole = f"<ASAP_Annotations><Annotations>{(one + '</Coordinates></Annotation>') * 2}</Annotations>"
    path.write_text(f'<?xml version="1.0" encoding="UTF-8"?>\n{whole}</ASAP_Annotations>\n')


def read_annotated(path: Path) -> None:
    row = Sample(2, "glass", "glass.tif", "p", annotation=path.name)
    mask = SlideMasks(path.parent / "slides.csv", path.parent, (row,), MaskOptions()).label(0, GLASS)
    for box in ((Interval(0, SIDE), Interval(0, SIDE)), (Interval(40, 90), Interval(200, SIDE))):
        assert mask.read(*box).shape == tuple(interval.length for interval in box)


XML = '<ASAP_Annotations><Annotations><Annotation PartOfGroup="T"><Coordinates/></Annotation></Annotations>{}'
ODD_XML: dict[str, str] = {
    "encoding unknown": '<?xml version="1.0" encoding="klingon"?>' + XML.format("</ASAP_Annotations>"),
    "encoding of many bytes": '<?xml version="1.0" encoding="utf-7"?>' + XML.format("</ASAP_Annotations>"),
    "encoding no text": '<?xml version="1.0" encoding="rot13"?>' + XML.format("</ASAP_Annotations>"),
    "encoding hex": '<?xml version="1.0" encoding="hex"?>' + XML.format("</ASAP_Annotations>"),
    "deep": "<ASAP_Annotations>" + "<a>" * 200_000,
    "entities": '<!DOCTYPE a [<!ENTITY b "xx"><!ENTITY c "&b;&b;">]><ASAP_Annotations>&c;</ASAP_Annotations>',
    "empty": "<ASAP_Annotations/>",
    "huge attribute": f'<ASAP_Annotations x="{"a" * 1_000_000}"/>',
}


def _texts(texts: Mapping[str, str]) -> dict[str, Write]:
    return {name: lambda path, text=text: path.write_text(text) for name, text in texts.items()}  # type: ignore[misc]


# Features


def _features(path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
    coords = np.stack([np.arange(20) % 5, np.arange(20) // 5], 1).astype(np.int64) * 256
    attributes = {"patch_size": 256, "patch_size_level0": 256, "level0_width": 1280, "level0_height": 1024}
    attributes |= {"level0_mpp": 0.5, "level0_magnification": 20, "name": "a"}
    write_features(path, Embedded(values, coords), attributes, {"model": "m", "weights": "w"})


def _tensor(path: Path) -> None:
    torch.save(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), path)


def read_features(path: Path) -> None:
    bag = FeatureFolder(path.parent, SlideOptions(), folder=path.parent).image(0)
    bag = open_bag(path)
    count = bag.size[1]
    assert bag.read(Interval(0, 1), Interval(0, min(count, MOST_ROWS))).shape[2] == bag.channels
    where = bag.places((), 0.0)
    if where is not None:
        slide, places, side = where
        cells = np.asarray(places)
        found = PatchMap(cells, np.zeros(len(cells), np.float32), side, "attention")
        assert grid_of(found).size
        assert geojson(slide, found)
        view = slide.thumbnail(512)
        view.read(*(Interval(0, side) for side in view.size))


def _edited(edit: Callable[[Any], None]) -> Write:
    def write(path: Path) -> None:
        _features(path)
        with h5py.File(path, "a") as file:
            edit(file)

    return write


def _coords(values: Any, **attributes: Any) -> Write:
    def edit(file: Any) -> None:
        told = dict(file["coords"].attrs)
        if values is not None:
            del file["coords"]
            file["coords"] = values
        for name, value in {**told, **attributes}.items():
            file["coords"].attrs[name] = value

    return _edited(edit)


def _replaced(name: str, make: Callable[[Any], Any]) -> Write:
    def edit(file: Any) -> None:
        del file[name]
        make(file)

    return _edited(edit)


def _elsewhere(file: Any) -> None:
    fifo = Path(file.filename).parent / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    file.create_dataset("features", (20, 8), np.float32, external=[(str(fifo), 0, 640)])


def _linked(file: Any) -> None:
    fifo = Path(file.filename).parent / "fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
    file["features"] = h5py.ExternalLink(str(fifo), "features")


def _huge(name: str, shape: tuple[int, int], dtype: type, chunks: tuple[int, int] = (1024, 2)) -> Write:
    return _replaced(name, lambda file: file.create_dataset(name, shape, dtype, chunks=chunks))


ODD_FEATURES: dict[str, Write] = {
    "features huge": _huge("features", (10**11, 8), np.float32),
    "features wide": _huge("features", (20, 10**8), np.float32, chunks=(1, 10**6)),
    "coords huge": _huge("coords", (10**11, 2), np.int64),
    "both huge": _edited(
        lambda file: [
            file.__delitem__("features"),
            file.__delitem__("coords"),
            file.create_dataset("features", (10**9, 8), "f4", chunks=(1024, 8)),
            file.create_dataset("coords", (10**9, 2), "i8", chunks=(1024, 2)),
        ]
    ),
    "coords NaN": _coords(np.full((20, 2), np.nan)),
    "coords 1e308": _coords(np.full((20, 2), 1e308)),
    "coords 2**62": _coords(np.full((20, 2), 2**62)),
    "coords negative": _coords(np.full((20, 2), -(2**62))),
    "coords of text": _coords(np.full((20, 2), b"x")),
    "coords of bool": _coords(np.full((20, 2), True)),
    "coords complex": _coords(np.full((20, 2), 1j)),
    "coords a number": _coords(7),
    "coords a group": _replaced("coords", lambda file: file.create_group("coords")),
    "features a group": _replaced("features", lambda file: file.create_group("features")),
    "features a number": _replaced("features", lambda file: file.__setitem__("features", 1.0)),
    "features nothing": _replaced("features", lambda file: file.__setitem__("features", h5py.Empty("f"))),
    "features complex": _replaced("features", lambda file: file.__setitem__("features", np.ones((20, 8), complex))),
    "features of text": _replaced("features", lambda file: file.__setitem__("features", np.full((20, 8), b"x"))),
    "features compound": _replaced(
        "features", lambda file: file.__setitem__("features", np.zeros((20, 8), [("a", "f4"), ("b", "f4")]))
    ),
    "features 1e308": _replaced("features", lambda file: file.__setitem__("features", np.full((20, 8), 1e308))),
    "features long double": _replaced("features", lambda file: file.__setitem__("features", np.ones((20, 8), "g"))),
    "features in a pipe": _replaced("features", _elsewhere),
    "features of another file": _replaced("features", _linked),
    "features are themselves": _replaced("features", lambda file: file.update(features=h5py.SoftLink("/features"))),
    "type in place of features": _replaced("features", lambda file: file.__setitem__("features", np.dtype("f4"))),
    **{
        f"{name} {value}": _coords(None, **{name: value})
        for name in ("patch_size_level0", "level0_width", "level0_mpp", "level0_magnification")
        for value in (np.nan, np.inf, 1e300, -1.0, 0, 1e-300, "x", b"\xff", [1, 2], True, 2**62)
    },
    "settings deep": _edited(lambda file: file.attrs.__setitem__("mpi4dl", "[" * 30_000)),
    "settings of numbers": _edited(lambda file: file.attrs.__setitem__("mpi4dl", '{"model": [1], "weights": {}}')),
    "settings with an escape": _edited(
        lambda file: file.attrs.__setitem__("mpi4dl", '{"model": "\\u001b[31m\\n", "weights": "\\ud800"}')
    ),
}  # fmt: skip


# Weights


def _weights(path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    state = OrderedDict(
        (f"layer{n}.{name}", torch.randn(4, 5, generator=random)) for n in range(3) for name in ("weight", "bias")
    )
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(dict(state), path, {"format": "pt"})
    else:
        torch.save({"epoch": 3, "hyper_parameters": Namespace(lr=0.1), "state_dict": state}, path)


def _legacy(path: Path) -> None:
    torch.save({"a.weight": torch.ones(4, 5), "b": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def read_weights(path: Path) -> None:
    """As `load_weights` on a rank: each value, flattened, and copied into a parameter."""
    found = open_weights(str(path))
    for name, shape in found.shapes.items():
        if np.prod(shape, dtype=float) > 1 << 20:
            continue
        flat = found.read(name).reshape(-1)
        torch.empty(shape, dtype=flat.dtype).copy_(flat[:].view(shape))


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/mpi4dl-code-ran",)


class _Bytes:
    """A bytearray of more bytes than there is memory, as the unpickler of weights alone allows it."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 42,)


def _saved(make: Callable[[], Any]) -> Write:
    return lambda path: torch.save(make(), path)


def _nested(depth: int) -> Any:
    found: Any = torch.ones(1)
    for _ in range(depth):
        found = {"state_dict": found}
    return found


def _itself() -> Any:
    found: dict[str, Any] = {}
    found["state_dict"] = found
    return found


def _twice() -> Any:
    found: Any = {"x": 1}
    for _ in range(60):
        found = {"a": found, "b": found}
    return found


def _quantized(shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


def _compressed(path: Path) -> None:
    """What torch.save wrote, packed once more, with 128 MiB of zeros in it."""
    stored = path.with_suffix(".stored")
    torch.save({"a": torch.ones(4, 4)}, stored)
    with zipfile.ZipFile(stored) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name) + bytes(1 << 27) * name.endswith("data.pkl"))


ODD_WEIGHTS: dict[str, Write] = {
    "compressed": _compressed,
    "code": _saved(_Runs),
    "code in a dict": _saved(lambda: {"a": torch.ones(2), "b": _Runs()}),
    "bytes": _saved(_Bytes),
    "nested": _saved(lambda: _nested(200)),
    "itself": _saved(_itself),
    "itself twice": _saved(_twice),
    "a number": _saved(lambda: 7),
    "a list": _saved(lambda: [torch.ones(2)]),
    "names no text": _saved(lambda: {1: torch.ones(2), (2,): torch.ones(2)}),
    "names odd": _saved(lambda: {"\x1b[31m\n": torch.ones(2), "\ud800": torch.ones(2)}),
    "sparse": _saved(lambda: {"a": torch.eye(4).to_sparse()}),
    "meta": _saved(lambda: {"a": torch.ones(4, device="meta")}),
    "quantized": _saved(lambda: {"a": _quantized((4,))}),
    "complex": _saved(lambda: {"a": torch.ones(4, dtype=torch.complex64)}),
    "expanded": _saved(lambda: {"a": torch.ones(1).expand(1 << 40)}),
    "empty": _saved(dict),
    "NaN": _saved(lambda: {"a": torch.full((3,), torch.nan)}),
    "bool": _saved(lambda: {"a": torch.ones(3, dtype=torch.bool)}),
}
ODD_TENSORS: dict[str, Write] = {
    **{name: ODD_WEIGHTS[name] for name in ("code", "compressed", "bytes", "itself", "a number", "a list", "empty")},
    "sparse": _saved(lambda: torch.eye(4).to_sparse()),
    "meta": _saved(lambda: torch.ones(4, 4, device="meta")),
    "quantized": _saved(lambda: _quantized((4, 4))),
    "expanded": _saved(lambda: torch.ones(1, 1).expand(1 << 40, 8)),
    "bfloat16": _saved(lambda: torch.ones(4, 4, dtype=torch.bfloat16)),
    "float8": _saved(lambda: torch.ones(4, 4).to(torch.float8_e4m3fn)),
    "NaN": _saved(lambda: torch.full((3, 4), torch.nan)),
    "needs a gradient": _saved(lambda: torch.ones(3, 4, requires_grad=True)),
    "1e308": _saved(lambda: torch.full((3, 4), 1e308, dtype=torch.float64)),
}


def _header(header: Any, values: bytes = bytes(16), length: int | None = None) -> Write:
    def write(path: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + values)

    return write


def _one(**more: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **more}}


VALUE = json.dumps(_one())[1:-1]
ODD_SAFETENSORS: dict[str, Write] = {
    "empty": lambda path: path.write_bytes(b""),
    "header 2**63": _header(_one(), length=2**63),
    "header 2**32": _header(_one(), length=2**32),
    "header no JSON": _header(b"{"),
    "header no text": _header(b"\xff\xfe{}"),
    "header deep": _header(b"[" * 100_000),
    "shape 2**62": _header(_one(shape=[2**62, 4])),
    "shape negative": _header(_one(shape=[-4])),
    "shape 1e308": _header(_one(shape=[1e308])),
    "offsets beyond": _header(_one(data_offsets=[0, 2**60])),
    "offsets swapped": _header(_one(data_offsets=[16, 0])),
    "dtype unknown": _header(_one(dtype="F33")),
    "dtype of 4 bits": _header(_one(dtype="F4", shape=[32])),
    "dtype of 8 bits": _header(_one(dtype="F8_E8M0", shape=[16])),
    "complex": _header(_one(dtype="C64", shape=[2])),
    "twice": _header(f"{{{VALUE},{VALUE}}}".encode()),
    "metadata no text": _header({"__metadata__": {"classes": [1]}, **_one()}),
    "metadata odd": _header({"__metadata__": {"b": "a", "classes": "{", "mpi4dl": "["}, **_one()}),
    "no values": _header({}, b""),
}  # fmt: skip


# Folders of runs


def config() -> Config:
    return parse(["--image-size", "64", "--batch-size", "4"])


def _config(path: Path) -> None:
    path.write_text(to_toml(config()))


ODD_TOML: dict[str, str] = {
    "deep": "a = " + "[" * 100_000,
    "deep tables": "[" + ".".join("a" * 20_000) + "]\nb = 1",
    "large": "[training]\nepochs = " + "9" * 5000,
    "1e308": "[training]\nepochs = 1e308\n[optimizer]\nlr = inf\n",
    "NaN": "[optimizer]\nlr = nan\n",
    "negative": "[training]\nepochs = -1\nbatch_size = -9223372036854775808\n",
    "twice": "[training]\nepochs = 1\nepochs = 2\n",
    "date": "[training]\nepochs = 2020-01-01\n",
    "escape": '[training]\n"\\u001b[31m" = 1\n',
    "escape in a value": '[model]\nmodel = "\\u0000\\u001b[31m"\n',
    "section twice": "[training]\n[training]\n",
    "a number for a section": "training = 1\n",
    "UTF-16": "\ufeff[training]\n",
}


def description_content() -> Any:
    images = SimpleNamespace(training=SimpleNamespace(task="classify"), classes=("a", "b"), channels=3)
    return {"version": 1, **asdict(Description.of(config(), images, 2))}


def read_description(path: Path) -> None:
    found = Description.read(path.read_text(errors="surrogateescape"), str(path))
    assert 0 < found.num_outputs < 1 << 32
    assert 0 < found.channels < 1 << 32
    found.config(str(path), False)


def write_samples(path: Path) -> None:
    lines = ["file,slide_id,case_id,label,split,fold,mpp,annotation,mask_print,bytes,crc32"]
    lines += ["a/1.png,1,p1,a,train,,,,,3,77", '"b/2,.png",2,p2,b,val,1,0.25,,,4,78', "b/3.png,3,p3,b,test,,,,,,"]
    path.write_text("\n".join(lines) + "\n")


def read_run_samples(path: Path) -> None:
    found = RunSamples.read(path)
    found.validating()
    for line in (*found.lines, {}):
        now = RunSamples(tuple(each._replace(label="a") for each in found.samples), (line,), found.columns)
        [*found.changes(now)]
        with suppress(ConfigError):
            found.require_unchanged(now)


def records_content() -> Any:
    return {"version": 1, "settings": {"weights": "w", "images": "i", "fit": "resize", "lr": 0.5}}


def _records(path: Path) -> None:
    lines = [{"image": name, "file": {"bytes": 3}, "files": {f"masks/{name}.png": 4}, "mask": "b"} for name in "abc"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_records(path: Path) -> None:
    if path.name == "predictions.jsonl":
        path.with_suffix(".json").write_text(json.dumps(records_content()))
    FolderJob(path.parent, PREDICTIONS, records_content()["settings"], {}).close()


def _as_json(content: Callable[[], Any]) -> Write:
    return lambda path: path.write_text(json.dumps(content(), indent=1))  # type: ignore[return-value]


def _packed(path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(geojson_content()).encode(), mtime=0))


def kinds() -> dict[str, Kind]:
    spacing = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    return {
        "pyramid": Kind("a.tif", _pyramid, read_slide),
        "OME": Kind("a.ome.tif", partial(_pyramid, subifds=1, metadata=spacing), read_slide),
        "Aperio": Kind("a.svs", _svs, read_slide),
        "DICOM": Kind("a.dcm", _dicom, read_slide),
        "DICOM of JPEG": Kind("a.dcm", partial(_dicom, sparse=True, syntax=JPEGBaseline8Bit), read_slide),
        "PNG": Kind("a.png", _picture, read_slide),
        "JPEG": Kind("a.jpg", _picture, read_slide),
        "table": Kind("slides.csv", _table, read_table, text=True),
        "split": Kind("split.csv", _split, read_split, text=True),
        "GeoJSON": Kind("a.geojson", _as_json(geojson_content), read_annotated, text=True),
        "packed GeoJSON": Kind("a.geojson.gz", _packed, read_annotated),
        "ASAP": Kind("a.xml", _asap, read_annotated, text=True, odd=_texts(ODD_XML)),
        "features": Kind("a.h5", _features, read_features, odd=ODD_FEATURES),
        "CLAM's features": Kind("a.pt", _tensor, read_features, odd=ODD_TENSORS),
        "weights": Kind("w.pt", _weights, read_weights, odd=ODD_WEIGHTS),
        "old weights": Kind("w.pth", _legacy, read_weights),
        "safetensors": Kind("w.safetensors", _weights, read_weights, odd=ODD_SAFETENSORS),
        "TOML": Kind(
            "config.toml", _config, lambda path: parse(["--config", str(path)]), text=True, odd=_texts(ODD_TOML)
        ),
        "description": Kind("model.json", _as_json(description_content), read_description, text=True),
        "samples": Kind(SAMPLES, write_samples, read_run_samples, text=True),
        "settings": Kind("predictions.json", _as_json(records_content), read_records, text=True),
        "records": Kind("predictions.jsonl", _records, read_records, text=True),
    }
