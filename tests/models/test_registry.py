"""Every name builds its model, and every mistake says what would have been right."""

import sys

import pytest
import torch

from mpi4dl import models
from mpi4dl._torchvision import import_torchvision, torchvision_models
from tests.models.counting import num_parameters

OF_IMAGES = [
    "amoebanetd",
    "resnet1001_v2",
    "resnet110_v2",
    "resnet1d",
    "resnet3d",
    "resnet_v1",
    "resnet_v2",
    "small_resnet",
    "unet",
    "unet3d",
    "vit",
]
OF_TOKENS = ["bert", "bert_2_5b", "bert_base", "gpt", "gpt2", "gpt2_large", "gpt2_medium", "gpt2_xl"]
OF_TILES = ["conch", "gigapath", "hoptimus0", "hoptimus1", "uni", "uni2", "virchow", "virchow2"]  # see test_pathology
SIZES = {"resnet1d": (33,), "resnet3d": (9, 33, 47), "unet3d": (9, 33, 47), "vit": (32, 32)}


def test_names_are_ours_and_torchvisions_when_asked():
    assert models.names() == sorted(OF_IMAGES + OF_TOKENS + OF_TILES)
    everything = models.names(torchvision=True)
    assert {*OF_IMAGES, *OF_TOKENS, "resnet50", "densenet121", "fcn_resnet50"} < set(everything)
    assert everything == sorted(everything)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if "1001" in name else ()) for name in OF_IMAGES]
)
@pytest.mark.sample(3)
def test_every_own_name_builds_with_its_own_and_with_another_number_of_classes(name):
    with torch.device("meta"):
        models.build(name)
        model = models.build(name, num_classes=7).eval()
        size = SIZES.get(name, (33, 47))
        logits = model(torch.empty(1, 3, *size))
    assert logits.shape == ((1, 7, *size) if name.startswith("unet") else (1, 7))


def test_names_say_what_their_models_take():
    assert [name for name in models.names() if models.registry.takes(name) == "tokens"] == OF_TOKENS
    assert models.registry.takes("resnet50") == models.registry.takes("timm/resnet10t") == "images"


@pytest.mark.parametrize("name", OF_TOKENS)
@pytest.mark.sample(3)
def test_models_of_tokens_build_for_another_vocabulary_and_have_no_classes(name):
    with torch.device("meta"):
        model = models.build(name, vocabulary=11).eval()
        assert model(torch.empty(2, 5, dtype=torch.int64)).shape == (2, 5, 11)
    with pytest.raises(ValueError, match=f"model '{name}' takes tokens and has no classes: leave out num_classes=7"):
        models.build(name, 7)


@pytest.mark.exhaustive
def test_options_reach_the_model():
    with torch.device("meta"):
        same = models.build("resnet_v2", 4, depth=1001), models.build("resnet1001_v2", 4)
        wide = models.build("resnet_v2", 4, depth=1001, num_filters=32)
    assert num_parameters(same[0]) == num_parameters(same[1]) < num_parameters(wide)


def test_torchvision_classifiers_have_the_size_that_torchvision_documents():
    with torch.device("meta"):
        assert num_parameters(models.build("resnet50")) == 25_557_032
        assert num_parameters(models.build("densenet121")) == 7_978_856
        assert models.build("resnet50", num_classes=4, zero_init_residual=True).fc.out_features == 4
        assert models.build("vit_b_16", num_classes=4, image_size=512).image_size == 512


def test_a_torchvision_segmenter_builds_without_downloading_its_backbone(monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)
    with torch.device("meta"):
        model = models.build("fcn_resnet50", num_classes=3).eval()
        assert model(torch.empty(1, 3, 65, 97))["out"].shape == (1, 3, 65, 97)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("AmoebaNet-D", "are 'amoebanetd' "), ("resnet5O", "are 'resnet50', "), ("zzzz", "are 'amoebanetd', .*'vit' ")],
)
def test_an_unknown_name_gets_the_nearest_ones(name, nearest):
    with pytest.raises(ValueError, match=f"model '{name}' is unknown; the nearest names {nearest}"):
        models.build(name)


def test_an_unknown_option_gets_the_legal_ones():
    legal = "its options are 'depth', 'in_channels', 'norm', 'num_classes', 'num_filters'"
    with pytest.raises(ValueError, match=f"model 'unet' has no option 'num_layer'; {legal}"):
        models.build("unet", num_layer=3)
    with pytest.raises(ValueError, match=r"'resnet110_v2' has no option 'depth'; .* 'in_channels', 'num_classes'"):
        models.build("resnet110_v2", depth=20)


@pytest.mark.parametrize("name", ["resnet18", "fcn_resnet50"])
def test_an_unknown_option_of_a_torchvision_model_gets_the_legal_ones(name):
    with pytest.raises(ValueError, match=f"'{name}' has no option 'depth'; its options are .*'num_classes'"):
        models.build(name, depth=20)


def test_an_option_that_torchvision_sets_itself_is_refused_in_its_words():
    with pytest.raises(ValueError, match=r"refuses the options \{'layers': 3\} for 'resnet18': .*multiple values"):
        models.build("resnet18", layers=3)


def test_no_classes_are_refused():
    with pytest.raises(ValueError, match="num_classes=0 is not possible"):
        models.build("unet", num_classes=0)


def test_every_name_of_torchvision_is_built_or_refused_with_a_reason() -> None:
    buildable = models.names(torchvision=True)
    every = import_torchvision().models
    assert {*torchvision_models()} == {*every.list_models()}
    for name in every.list_models():
        assert (torchvision_models()[name] or "models") == every.get_model_builder(name).__module__.split(".")[-2]
        if name in buildable:
            assert models.registry.refusal(name) is None
        else:
            with pytest.raises(ValueError, match=f"model '{name}' takes "):
                models.build(name)
    assert {"r3d_18", "mvit_v2_s", "swin3d_b", "quantized_resnet50", "lraspp_mobilenet_v3_large"} < {*buildable}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ssd300_vgg16", r"a list of images .* returns losses of its own: .* ssd300_vgg16.backbone, with heads"),
        ("raft_small", "takes two images, and returns a list"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"model '{name}' .*{reason}"):
        models.build(name)


def test_the_backbone_of_a_detection_model_is_a_model() -> None:
    with torch.device("meta"):
        backbone = models.build("fasterrcnn_mobilenet_v3_large_fpn.backbone", num_classes=3)
        maps = backbone(torch.empty(1, 3, 65, 97))
    assert {name: tuple(value.shape) for name, value in maps.items()} == {
        "0": (1, 256, 3, 4),
        "1": (1, 256, 3, 4),
        "pool": (1, 256, 2, 2),
    }
    with pytest.raises(ValueError, match=r"model 'resnet18.backbone' is unknown"):
        models.build("resnet18.backbone")


def test_integer_weights_are_refused_and_the_same_model_in_floating_point_is_not() -> None:
    with torch.device("meta"):
        assert num_parameters(models.build("quantized_resnet18")) == num_parameters(models.build("resnet18"))
    with pytest.raises(ValueError, match="'quantized_resnet18' with quantize=True has weights of 8 bits"):
        models.build("quantized_resnet18", quantize=True)


def test_models_that_warn_of_their_initial_values_are_told_what_they_are() -> None:
    models.build("googlenet", 3)  # a warning fails the test


def test_models_of_timm() -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    assert type(models.build("timm/resnet10t", 5)) is type(timm.create_model("resnet10t"))
    with pytest.raises(ValueError, match="timm has no model 'resnet10'; the nearest names are 'resnet10t'"):
        models.build("timm/resnet10")


def test_models_of_smp() -> None:
    import_torchvision()
    smp = pytest.importorskip("segmentation_models_pytorch")
    with torch.device("meta"):
        model = models.build("smp/Unet", 3, encoder_name="resnet18", in_channels=4)
        assert type(model) is smp.Unet
        assert model.eval()(torch.empty(2, 4, 32, 64)).shape == (2, 3, 32, 64)
        assert models.registry.option_of_channels("smp/Unet") == "in_channels"
    with pytest.raises(ValueError, match="has no model 'UNet'; the nearest names are 'Unet'"):
        models.build("smp/UNet")
    with pytest.raises(ValueError, match=r"no encoder 'resnet20'; the nearest names are .*'resnet101'.*, and tu-NAME"):
        models.build("smp/FPN", encoder_name="resnet20")
    with pytest.raises(ValueError, match=r"refuses the options \{'depth': 3\} for 'FPN': .*depth"):
        models.build("smp/FPN", depth=3)


@pytest.mark.parametrize(("name", "package"), [("timm/resnet10t", "timm"), ("smp/Unet", "segmentation_models_pytorch")])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"model {name} needs the package {package}; run .* -m pip install {package}"):
        models.build(name)
