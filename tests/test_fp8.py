"""Weights of linear layers as float8: numbers, which layers, how they compute, files. Without a pool."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

import penstock
from penstock.errors import ConfigError, DestinationError, DeviceError
from penstock.fp8 import Float8Linear, Fp8, convert, layers, numbers, prepare, save

BOTH = pytest.mark.parametrize("scales", ["row", "tensor"])


def rounded(weight: torch.Tensor, scales: str = "row") -> tuple[torch.Tensor, torch.Tensor, numbers.TensorError]:
    """What a weight becomes, with its scales, and the error."""
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(numbers.shape_of_scale(weight.shape[0], scales))
    return stored, scale, numbers.quantise(weight, stored, scale)


def weights(rows: int = 48, columns: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 8).to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# Numbers


@BOTH
def test_every_number_is_the_nearest_that_the_scale_allows(scales: str) -> None:
    weight = weights()
    stored, scale, error = rounded(weight, scales)
    all_numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = all_numbers[all_numbers.isfinite()].unique()
    distance = (weight.float()[..., None] - grid * scale[..., None]).abs().amin(-1)
    found = (stored.float() * scale - weight.float()).abs()
    # What lies in the middle of two may go to either: the quotient is rounded first.
    assert torch.allclose(found, distance, rtol=1e-5, atol=0)
    assert error.largest == found.max()
    assert error.relative == pytest.approx(float(distance.norm() / weight.float().norm()), rel=1e-5)
    assert 0 < error.relative < 0.04


def test_the_largest_magnitude_of_each_row_is_kept_to_a_rounding_of_float32() -> None:
    weight = weights()
    stored, scale, _ = rounded(weight)
    largest = weight.float().abs().amax(1)
    assert torch.allclose((stored.float() * scale).abs().amax(1), largest, rtol=1e-6)
    assert torch.equal(numbers.dequantised(stored, scale, torch.bfloat16).abs().amax(1), weight.abs().amax(1))


def test_a_row_of_zeros_stays_one() -> None:
    weight = weights()
    weight[3] = 0
    weight[4] = -0.0
    stored, scale, error = rounded(weight)
    assert not stored[3:5].float().any()
    assert torch.equal(scale[3:5], torch.ones(2, 1))
    assert error.not_finite == 0
    assert rounded(torch.zeros(4, 8))[2] == (0.0, 0.0, 0)


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_nan_and_changes_no_other(scales: str, value: float) -> None:
    weight = weights()
    # The largest one of its row is not the one that goes.
    weight[5, 7] = 0
    without, of_others, error_without = rounded(weight, scales)
    weight[5, 7] = value
    stored, scale, error = rounded(weight, scales)
    assert stored[5, 7].isnan()
    stored[5, 7] = 0
    assert same(stored, without)
    assert torch.equal(scale, of_others)
    assert error == (*error_without[:2], 1)


def test_a_row_without_any_finite_number_is_nan() -> None:
    weight = weights()
    weight[2] = float("inf")
    stored, scale, error = rounded(weight)
    assert stored[2].float().isnan().all()
    assert scale[2] == 1
    assert error.not_finite == 64
    assert not stored.float().isnan()[[0, 1, 3]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_subnormal_and_huge_numbers_are_scaled_like_others(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    weight = weights(4, 32, dtype)
    weight[0] = limits.max
    weight[1, ::2] = -limits.max
    weight[2] = limits.smallest_normal / 2
    weight[3] = 0
    weight[3, 0] = limits.smallest_normal / 64
    stored, scale, error = rounded(weight)
    back = numbers.dequantised(stored, scale, dtype)
    assert back.isfinite().all()
    assert torch.equal(back[0], weight[0])
    if dtype is torch.float16:
        assert torch.equal(back[2:], weight[2:]), "a scale of float32 reaches them"
    else:
        # Below the smallest normal float32, for which no such scale exists: coarser, and far below what counts.
        assert (back[2:].float() - weight[2:].float()).abs().max() <= 2.0**-126 * 2.0**-9
    assert error.not_finite == 0


@BOTH
def test_a_tensor_that_is_converted_in_parts_is_the_same(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(37)
    weight[11, 0] = float("nan")
    stored, scale, error = rounded(weight, scales)
    monkeypatch.setattr(numbers, "_AT_ONCE", 5 * 64)
    in_parts = rounded(weight, scales)
    assert same(stored, in_parts[0])
    assert torch.equal(scale, in_parts[1])
    assert in_parts[2] == (error.largest, pytest.approx(error.relative), error.not_finite)


# Which layers


class Net(torch.nn.Module):
    """One of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 64, bias=False)
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64))
        self.lm_head = torch.nn.Linear(64, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(tokens))
        x = self.second(self.first(x))
        x = self.normed(self.attention(x, x, x, need_weights=False)[0])
        return self.lm_head(x)


def net(kind: type[torch.nn.Module] = Net, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype).eval()


def converted_in(module: torch.nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if isinstance(layer, Float8Linear)]


TOKENS = torch.arange(12).view(2, 6)


def test_linear_layers_are_converted_and_nothing_else() -> None:
    module, before = net(), net().state_dict()
    errors = convert(module)
    assert converted_in(module) == ["first", "second"]
    assert list(errors) == ["first.weight", "second.weight"]
    state = module.state_dict()
    assert state.keys() - before.keys() == {"first.weight_scale", "second.weight_scale"}
    for name in before.keys() - errors.keys():
        assert torch.equal(state[name], before[name])
    assert state["first.weight"].dtype == torch.float8_e4m3fn
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_skip_names_layers_by_their_whole_name_or_the_last_part_of_it() -> None:
    def names(*skip: str) -> list[str]:
        module = torch.nn.ModuleDict({"a": net(), "b": net()})
        convert(module, Fp8(skip=skip))
        return converted_in(module)

    assert names("lm_head", "first") == ["a.second", "b.second"]
    assert names("*head", "b.*") == ["a.first", "a.second"]
    assert names() == [f"{of}.{name}" for of in "ab" for name in ("first", "second", "lm_head")]


def test_layers_tied_to_each_other_are_converted_together_and_those_tied_to_others_are_not() -> None:
    module = net()
    module.second.weight = module.first.weight
    module.lm_head.weight = module.embedding.weight
    errors = convert(module, Fp8(skip=()))
    assert converted_in(module) == ["first", "second"]
    assert module.first._buffers["weight"] is module.second._buffers["weight"]
    assert list(errors) == ["first.weight"]
    assert isinstance(module.lm_head.weight, torch.nn.Parameter)


@pytest.mark.parametrize(
    ("module", "scheme", "says"),
    [
        (lambda: torch.nn.Conv2d(3, 3, 3), "fp8", "has no torch.nn.Linear"),
        (lambda: net(dtype=torch.float32), "fp8", "weight of bfloat16 or float16"),
        (net, Fp8(skip=("*",)), "names every linear layer"),
        (net, "int4", "neither"),
        (net, None, "neither"),
    ],
)
def test_what_cannot_be_converted_is_refused(module: object, scheme: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        convert(module(), scheme)


def test_a_weight_without_memory_is_refused_before_anything_has_changed() -> None:
    module = net()
    module.second.to("meta")
    with pytest.raises(DestinationError, match=r"second\.weight"):
        convert(module)
    assert converted_in(module) == []


@pytest.mark.parametrize("wrong", [{"scales": "block"}, {"compute": "int8"}])
def test_settings_that_do_not_exist_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is not one of"):
        Fp8(**wrong)


def test_an_old_torch_stores_float8_and_does_not_multiply_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "installed_version", lambda _: (2, 4))
    module = net()
    with pytest.raises(DeviceError, match=r"torch 2\.5"):
        convert(module, Fp8(compute="fp8"))
    assert converted_in(module) == []
    convert(module)
    assert not module.first.computes


# Computing


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_computes_what_a_layer_with_the_rounded_weight_does(scales: str, dtype: torch.dtype) -> None:
    module, x = net(dtype=dtype).first, weights(5, dtype=dtype)
    plain = copy.deepcopy(module)
    stored, scale, _ = rounded(plain.weight.detach(), scales)
    plain.weight = torch.nn.Parameter((stored.float() * scale).to(dtype))
    convert(module, Fp8(scales))
    assert torch.equal(module(x), plain(x))
    assert torch.equal(module.weight, plain.weight)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_multiplying_in_fp8_is_near_that(scales: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(64, 48, bias=bias).to(dtype)
    x = torch.randn(2, 5, 64).to(dtype)
    x[0, 0] = 0
    expected = module(x)
    convert(module, Fp8(scales, compute="fp8"))
    with torch.inference_mode():
        answer = module(x)
    assert answer.dtype == dtype
    assert answer.shape == expected.shape
    off = (answer - expected).float().norm() / expected.float().norm()
    assert 0.001 < off < 0.06
    if dtype is torch.bfloat16 or scales == "tensor":
        stored = module._buffers["weight"]
        assert module._can_compute(x, stored, module._buffers["weight_scale"])
        assert not torch.equal(answer, copy.deepcopy(module).train()(x.clone().requires_grad_())), "activations too"


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (64,), (2, 3, 64)])
def test_any_shape_of_input_is_computed(shape: tuple[int, ...]) -> None:
    module = net().first
    convert(module, Fp8(compute="fp8"))
    with torch.inference_mode():
        assert module(torch.ones(shape, dtype=torch.bfloat16)).shape == shape


def test_features_that_fp8_cannot_multiply_are_computed_with_dequantised_weights() -> None:
    module = torch.nn.Linear(30, 7).bfloat16()
    convert(module, Fp8(compute="fp8"))
    x = weights(4, 30)
    with torch.inference_mode():
        assert torch.equal(module(x), torch.nn.functional.linear(x, module.weight, module.bias))


def test_gradients_of_inputs_are_those_of_the_dequantised_weight() -> None:
    module = net().first
    convert(module, Fp8(compute="fp8"))
    x = weights(3).requires_grad_()
    module(x).sum().backward()
    assert torch.allclose(x.grad, module.weight.sum(0).expand(3, -1), rtol=0.02, atol=0.02)


def test_code_that_reads_the_weight_of_a_layer_goes_on() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
    torch.manual_seed(0)
    module = transformers.T5EncoderModel(config).bfloat16().eval()
    expected = module(TOKENS).last_hidden_state
    convert(module)
    # T5 casts what it gives to ``wo`` to the dtype of its weight.
    assert "encoder.block.0.layer.1.DenseReluDense.wo" in converted_in(module)
    assert module.dtype == torch.bfloat16
    answer = module(TOKENS).last_hidden_state
    assert torch.nn.functional.cosine_similarity(answer.float(), expected.float(), dim=-1).min() > 0.98


def test_a_change_of_dtype_changes_what_is_computed_in_and_not_the_numbers() -> None:
    module = net()
    convert(module)
    before = {name: module.first._buffers[name] for name in ("weight", "weight_scale")}
    module.to("cpu")
    assert all(module.first._buffers[name] is one for name, one in before.items())
    module.half()
    assert all(same(module.first._buffers[name], one) for name, one in before.items())
    assert module.first.weight.dtype == torch.float16
    assert module(TOKENS).dtype == torch.float16
    assert module.float()(TOKENS).dtype == torch.float32
    assert module.to("meta").first.weight.is_meta


def test_a_layer_that_is_given_another_weight_uses_it() -> None:
    module = net().first
    convert(module)
    module.weight = torch.nn.Parameter(weights(64))
    x = weights(3)
    assert torch.equal(module(x), torch.nn.functional.linear(x, weights(64), module.bias))


@BOTH
def test_another_weight_is_rounded_into_the_memory_of_a_layer(scales: str) -> None:
    layer, other = net().first, net().second.weight.detach()
    expected = rounded(other, scales)
    convert(layer, Fp8(scales))
    memory = layer._buffers["weight"].data_ptr(), layer._buffers["weight_scale"].data_ptr()
    assert layer.requantise(other) == expected[2]
    assert torch.equal(layer.weight, numbers.dequantised(*expected[:2], torch.bfloat16))
    assert memory == (layer._buffers["weight"].data_ptr(), layer._buffers["weight_scale"].data_ptr())
    with pytest.raises(DestinationError, match=r"one of \[64, 64\]"):
        layer.requantise(other[:3])
    with pytest.raises(DestinationError, match="no float8 weight in memory"):
        layer.to("meta").requantise(other)


def test_copies_and_compiled_modules_compute_the_same() -> None:
    module, x = torch.nn.Sequential(net().first, net().second), weights(5)
    for compute in ("weights", "fp8"):
        each = copy.deepcopy(module)
        convert(each, Fp8(compute=compute))
        with torch.inference_mode():
            expected = each(x)
            assert torch.equal(copy.deepcopy(each)(x), expected)
            compiled = torch.compile(each, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), expected)


# Files


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_that_is_written_comes_back_bit_by_bit(scales: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module = net(dtype=dtype)
    module.second.weight = module.first.weight
    convert(module, Fp8(scales))
    save(module, tmp_path / "net.safetensors", {"who": "me"})
    checkpoint = penstock.open(tmp_path / "net.safetensors")
    assert checkpoint.metadata() == {"format": "pt", "who": "me", "fp8.dtype": str(dtype).removeprefix("torch.")}
    assert checkpoint["first.weight"].dtype == "F8_E4M3"
    assert tuple(checkpoint["first.weight_scale"].shape) == ((64, 1) if scales == "row" else (1,))
    assert "second.weight" not in checkpoint
    again = Net().to(dtype).eval()
    again.second.weight = again.first.weight
    assert prepare(again, checkpoint) == ["first", "second"]
    checkpoint.load_into(again)
    assert torch.equal(again(TOKENS), module(TOKENS))


def test_a_module_without_float8_weights_or_without_memory_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no float8 weights"):
        save(net(), tmp_path / "a.safetensors")
    module = net()
    convert(module)
    with pytest.raises(DestinationError, match="no memory"):
        save(module.to("meta"), tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_scales_that_are_none_of_ours_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    tensors = {"weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(4, 4)}
    safetensors_torch.save_file(tensors, tmp_path / "blocks.safetensors")
    layer = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(DestinationError, match=r"\[4, 4\]"):
        prepare(layer, penstock.open(tmp_path / "blocks.safetensors"))
    tensors["weight_scale"] = torch.ones(64, 1)
    safetensors_torch.save_file(tensors, tmp_path / "dtype.safetensors", {"fp8.dtype": "int3"})
    with pytest.raises(ConfigError, match="int3"):
        prepare(layer, penstock.open(tmp_path / "dtype.safetensors"))
    assert prepare(layer, penstock.open(tmp_path / "dtype.safetensors"), dtype=torch.float16) == [""]
    assert layer.weight.dtype == torch.float16
