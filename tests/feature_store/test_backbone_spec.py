"""Backbone files and short names, and the pixel backbone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from feature_store.backbones import Transform, load_backbone, read_spec
from feature_store.backbones.backbone import prepare_image
from labeler.errors import BadData, InvalidSetting

GOOD = """
kind = "timm"
architecture = "mobilenetv2_100"
weights = "w.safetensors"
[options]
pad_type = "same"
[transform]
resize = 256
crop = 224
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]
"""


def test_a_backbone_file_names_weights_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "backbone.toml"
    path.write_text(GOOD)
    spec = read_spec(path)
    assert spec.weights == tmp_path / "w.safetensors"
    assert spec.transform is not None
    assert spec.transform.channels == 3


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("pad_type", "pad_type", ""),
        ('kind = "timm"', 'kind = "timm"\ncolour = 1', "colour: unknown field"),
        ("crop = 224", "crop = 257", "crop 257 must be at most resize 256"),
        ("std = [0.5, 0.5, 0.5]", "std = [0.5]", "one number per channel"),
        ("std = [0.5, 0.5, 0.5]", "std = [0.5, 0.5, nan]", "std"),
        ("crop = 224", "crop = 224\ninterpolation = 'magic'", "interpolation"),
        ('pad_type = "same"', "pretrained = true", "ours to set"),
        ('architecture = "mobilenetv2_100"', "", "needs an architecture"),
        (GOOD[GOOD.index("[transform]") :], "", "does not say how its images were prepared"),
        ('kind = "timm"', 'kind = "pixels"', "belong to kind timm"),
        (GOOD[GOOD.index("[options]") :], 'transform = "published"', ""),
        (GOOD[GOOD.index("[options]") :], 'transform = "guessed"', "transform"),
        ('kind = "timm"', 'kind = "packaged"', "kind packaged takes architecture = efficientnet-lite0"),
        ("[options]", "[options", "is not valid TOML: line 5, column 9"),
    ],
)
def test_each_wrong_field_has_its_sentence(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = tmp_path / "backbone.toml"
    path.write_text(GOOD.replace(old, new, 1))
    if not sentence:
        read_spec(path)
        return
    with pytest.raises((InvalidSetting, BadData), match=sentence) as caught:
        read_spec(path)
    assert str(tmp_path) not in str(caught.value)


def test_short_names_are_understood() -> None:
    assert read_spec("pixels:8").options == {"size": 8}
    assert read_spec("resnet18") == read_spec("timm:resnet18")
    assert read_spec("folder/digits.safetensors").kind == "simclr"
    with pytest.raises(InvalidSetting, match="pixels:16"):
        read_spec("pixels:big")
    with pytest.raises(InvalidSetting, match=r"no backbone file 'none\.toml'"):
        read_spec("none.toml")
    with pytest.raises(BadData, match="no checkpoint file"):
        load_backbone("folder/digits.safetensors")
    with pytest.raises(InvalidSetting, match="did you mean 'efficientnet-lite0'"):
        load_backbone("efficientnet-lite00", device="cpu")


def test_a_missing_file_of_weights_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom feature_store.backbones import load_backbone\nfrom labeler.errors import BadData\n"
        "for name, architecture in (('none.safetensors', None), ('none.safetensors', 'resnet18')):\n"
        "    try:\n        load_backbone(name, architecture=architecture)\n"
        "    except BadData as error:\n        assert \"'none.safetensors' in the folder named\" in str(error)\n"
        "    assert 'torch' not in sys.modules\n"
        "print('done')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "done\n"


def test_pixels_are_centred_by_a_constant() -> None:
    backbone = load_backbone("pixels:2")
    features = backbone.embed([np.array([[0, 255], [51, 204]], dtype=np.uint8)])
    assert np.allclose(features, [[-0.5, 0.5, -0.3, 0.3]])
    assert backbone.dimension == 4
    assert backbone.embed([]).shape == (0, 4)


def test_preparing_cuts_the_middle_square() -> None:
    wide = np.zeros((10, 30), dtype=np.uint8)
    wide[:, 10:20] = 200
    transform = Transform(resize=10, crop=10, mean=(0.0,), std=(1.0,), interpolation="nearest")
    assert (prepare_image(wide, transform) == 200).all()
    assert (prepare_image(wide.T.copy(), transform) == 200).all()


def test_preparing_equals_a_resize_followed_by_a_crop(rng: np.random.Generator) -> None:
    image = Image.fromarray(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8))
    transform = Transform(resize=40, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    slow = image.resize((60, 40), Image.Resampling.BILINEAR).crop((14, 4, 46, 36))
    assert np.abs(prepare_image(image, transform).astype(int) - np.asarray(slow).astype(int)).max() <= 1
