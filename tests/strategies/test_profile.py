import copy
import resource
import time

import pytest
import torch
from torch import nn

from benchmarks.memory_cases import Case, Transformer, fitted_cases, llama, lora, mlp, text, vectors
from rung.strategies.ledger import Ledger
from rung.strategies.profile import Line, Profile, highest, upper_envelope
from rung.strategies.trace import cannot_fake, profile_task


def profile_of(case, **more):
    return profile_task(case, case.make_optimizer, case.sample, **more)


SMALL = Case(name="s", build=lambda: Transformer(50, 64, 2), sample=text(64, 50), micro_batches=(1, 2, 4))


@pytest.fixture(scope="module")
def profile():
    return profile_of(SMALL)


def test_the_envelope_is_the_highest_line_at_every_micro_batch():
    lines = [Line(100, 1), Line(60, 5), Line(0, 20), Line(50, 5), Line(10, 10), Line(0, 0)]
    hull = upper_envelope(lines)
    for samples in range(1, 40):
        assert highest(hull, samples) == max(line.at(samples) for line in lines)
    assert len(hull) < len(lines)


def test_counts_are_those_of_the_real_model_and_optimizer(profile):
    model = SMALL.model()
    count = sum(p.numel() for p in model.parameters())
    assert profile.parameter_count == profile.trainable_count == count
    assert profile.weight_bytes == profile.gradient_bytes == 4 * count
    tensors = len(list(model.parameters()))
    assert profile.optimizer_bytes == 8 * count + 4 * tensors  # two moments, and Adam's step counter
    assert profile.method == "traced"
    assert {"blocks.0", "blocks.1", "embed", "head"} <= {group.name for group in profile.groups}


def test_lines_hold_at_a_size_that_was_not_traced(profile):
    assert profile.plain.residual < 1e-6


def test_a_real_step_books_the_same_bytes_as_a_traced_one():
    traced, real = profile_of(SMALL), profile_of(SMALL, fake=False)
    assert real.method == "measured"
    assert traced.plain.operations == pytest.approx(real.plain.operations, rel=0.05)
    assert traced.plain.moved.at(8) == pytest.approx(real.plain.moved.at(8), rel=0.05)
    # Some real kernels make a tensor more than their fake versions, none of weight.
    assert highest(traced.plain.first, 256) == pytest.approx(highest(real.plain.first, 256), rel=0.02)
    assert (traced.optimizer_bytes, traced.step_bytes) == (real.optimizer_bytes, real.step_bytes)


def test_weights_that_were_copied_deeply_are_not_taken_for_activations():
    def build():
        layer = nn.Linear(512, 512)
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(4)))

    case = Case(name="c", build=build, sample=vectors(512), micro_batches=(1, 2, 4))
    traced, real = profile_of(case), profile_of(case, fake=False)
    assert highest(traced.plain.again, 4) == pytest.approx(highest(real.plain.again, 4), rel=0.02)


def test_checkpointing_trades_activations_for_work(profile):
    assert profile.checkpointed is not None
    assert highest(profile.checkpointed.again, 32) < 0.75 * highest(profile.plain.again, 32)
    assert profile.checkpointed.flops.at(32) > 1.2 * profile.plain.flops.at(32)


def test_flops_are_six_per_weight_and_token():
    case = Case(name="m", build=lambda: mlp(128, 6), sample=vectors(128), micro_batches=(1, 2, 4))
    profile = profile_of(case)
    weights = 6 * 128 * 128
    # Forward 2, backward 4 for each weight; the first layer needs no gradient of its input.
    assert profile.plain.flops.at(10) == pytest.approx(10 * (6 * weights - 2 * 128 * 128), rel=0.01)


def test_frozen_weights_have_no_gradients_and_no_state():
    case = Case(name="l", build=lambda: lora(Transformer(50, 64, 1)), sample=text(16, 50), micro_batches=(1, 2, 4))
    profile = profile_of(case)
    assert profile.trainable_count < 0.2 * profile.parameter_count
    assert profile.optimizer_bytes < 9 * profile.trainable_count


def test_tied_weights_count_once():
    tied = Case(
        name="t", build=lambda: Transformer(500, 64, 1, tied=True), sample=text(16, 500), micro_batches=(1, 2, 4)
    )
    assert profile_of(tied).parameter_count == sum(p.numel() for p in tied.model().parameters())


def test_a_profile_survives_json(profile):
    assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(ValueError, match="another version"):
        Profile.from_json('{"format": 0}')


def test_recurrent_layers_are_measured_and_it_says_so():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(self.body(x)[0])

    def sample(count):
        return torch.zeros(count, 5, 8), torch.zeros(count, 5, 8)

    profile = profile_of(Case(name="r", build=Net, sample=sample, micro_batches=(1, 2, 4)))
    assert profile.method == "measured"
    assert "Recurrent" in profile.note


def test_shapes_that_depend_on_data_are_told_from_mistakes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y[y > 0].sum().expand(1, 1) * y

    case = Case(name="d", build=Net, sample=vectors(4), micro_batches=(1, 2, 4))
    with pytest.raises(Exception) as caught:
        profile_of(case)
    assert cannot_fake(caught.value)
    assert profile_of(case, fake=False).method == "measured"
    assert not cannot_fake(ValueError("labels are missing"))


def test_the_ledger_strikes_out_what_dies():
    ledger = Ledger()
    with ledger:
        tensor = torch.zeros(1000)
        view = tensor[10:]
        assert ledger.other == 4000
        del tensor
        assert ledger.other == 4000
        del view
    assert ledger.other == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", fitted_cases(), ids=lambda case: case.name)
def test_every_kind_of_model_can_be_profiled(case):
    profile = profile_of(case)
    assert profile.plain.flops.at(1) > 0
    assert profile.plain.residual < 0.02


@pytest.mark.slow
def test_a_decoder_of_70_billion_is_profiled_without_its_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    profile = profile_of(llama(70))
    assert profile.parameter_count > 65e9
    assert time.process_time() - began < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 2**20


def test_modules_that_only_making_the_model_imports_are_counted(tmp_path, monkeypatch):
    (tmp_path / "heavy_module_of_a_test.py").write_text("table = bytearray(b'x' * (64 << 20))\n")
    monkeypatch.syspath_prepend(tmp_path)

    def build():
        import heavy_module_of_a_test  # noqa: F401

        return nn.Linear(4, 4)

    case = Case(name="i", build=build, sample=vectors(4), micro_batches=(1, 2, 4))
    assert profile_of(case).imported_bytes >= 60 * 2**20
    assert profile_of(case).imported_bytes == 0  # they are there now
