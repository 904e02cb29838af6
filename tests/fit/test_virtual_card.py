import gc

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import workbench as wb
from workbench.fit.allocator import OutOfMemory
from workbench.fit.virtual_card import VirtualCard
from workbench.probes import memory

KIB, MIB = 1 << 10, 1 << 20
PATTERN = wb.Dilated([64, 256], [1, 4])


def inputs(n, heads=2, head_dim=32, dtype=torch.float32, grad=True):
    torch.manual_seed(n)
    return [torch.randn(1, n, heads, head_dim, dtype=dtype, requires_grad=grad) for _ in range(3)]


def gradients(q, k, v, pattern=PATTERN):
    return torch.autograd.grad(wb.attention(q, k, v, pattern, backend="torch").square().sum(), (q, k, v))


def peaks(card):
    return card.peak_requested_bytes, card.peak_reserved_bytes


def test_births_and_deaths():
    with VirtualCard(1) as card:
        a = torch.zeros(3 * MIB + 1, dtype=torch.uint8)
        b = torch.ones(100)
        c = a[5:].view(-1)  # a view takes nothing
        del a
        c.add_(1)  # nor does what is in place
        assert card.allocated_bytes == 3 * MIB + 512 + 512
        del c
        d = torch.zeros(2 * MIB, dtype=torch.uint8)
        assert card.allocated_bytes == 2 * MIB + 512
    assert peaks(card) == (3 * MIB + 401, 22 * MIB)
    del b, d  # they outlive the block
    assert card.allocated_bytes == 0


def test_what_was_made_before_counts_from_its_first_use():
    unused, used = torch.zeros(4 * MIB, dtype=torch.uint8), torch.zeros(MIB)
    with VirtualCard(1) as card:
        assert card.allocated_bytes == 0
        view = used[:7]
        assert card.allocated_bytes == 4 * MIB  # the storage is on the card, not its seven numbers
        view.sum()
    assert card.peak_requested_bytes == 4 * MIB + 4
    del used, view, unused
    assert card.allocated_bytes == 0


def test_a_resized_tensor_is_copied():
    with VirtualCard(1) as card:
        a = torch.zeros(2 * MIB, dtype=torch.uint8)
        a.resize_(3 * MIB)
        assert card.allocated_bytes == 3 * MIB and card.peak_requested_bytes == 5 * MIB
        out = torch.empty(0)
        torch.add(torch.ones(256), 1, out=out)
        assert card.allocated_bytes == 3 * MIB + 1024


def test_cycles_that_the_collector_finds():
    with VirtualCard(1) as card:
        for _ in range(50):
            held = [torch.zeros(MIB)]
            held.append(held)
        del held
        gc.collect()
        assert card.allocated_bytes == 0 and card.peak_requested_bytes >= 4 * MIB


def test_tensors_elsewhere_do_not_count():
    with VirtualCard(1) as card:
        a = torch.empty(1 << 40, device="meta")
        (a + a).to("meta")
        torch.ones(5).to("meta")
    assert card.peak_requested_bytes == 20


def test_python_inside_operators_counts():
    n = 500
    q, k, v = inputs(n, grad=False)
    with VirtualCard(1) as card:
        scores_of(q[0], k[0], v[0])
    # the scores and their softmax, of which only the parts of scaled_dot_product_attention know
    assert card.peak_requested_bytes >= 3 * n * 64 * 4 + 2 * 2 * n * n * 4
    with VirtualCard(1) as card:
        wb.attention(q, k, v, PATTERN, backend="torch")
    q, k, v = inputs(n, grad=False)
    visible = memory.measure(lambda: wb.attention(q, k, v, PATTERN, backend="torch"))
    inside = card.peak_requested_bytes - 3 * n * 64 * 4
    out_and_lse = n * 2 * 33 * 4
    assert out_and_lse + n * 2 * 32 * 4 // 4 < inside <= visible  # the parts to be merged, but no kernel's scratch


@torch.library.custom_op("virtual_test::scores", mutates_args=())
def scores_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).contiguous()


def test_what_does_not_fit_is_not_computed():
    a, seeded = torch.ones(1 << 20, 1), torch.Generator()
    wide = a.expand(-1, 1 << 30)
    for fn in (
        lambda: a @ a.mT, lambda: a - a.mT, lambda: wide.sin(), lambda: torch.empty(1 << 50),
        lambda: torch.bernoulli(wide, generator=seeded),
    ):  # fmt: skip
        with VirtualCard(1), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory: a tensor of"):
            fn()


def test_operands_without_a_name_go_with_the_error():
    a, seen = torch.ones(1 << 20, 1), []
    with VirtualCard(1) as card:
        try:
            (a + 1) @ a.mT
        except torch.OutOfMemoryError as error:
            seen.append(str(error))
        assert seen and card.allocated_bytes == a.nbytes


def test_compiled_functions_count_as_they_are_written():
    x = torch.ones(MIB)
    compiled = torch.compile(lambda x: (x.exp() + 1).log().sum(), backend="eager")
    with VirtualCard(1) as card:
        compiled(x)
    assert card.peak_requested_bytes == 3 * x.nbytes


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused_and_not_miscounted():
    q, k, v = (x.transpose(1, 2) for x in inputs(128, grad=False))
    with VirtualCard(1), pytest.raises(NotImplementedError):
        flex_attention(q, k, v)


@pytest.mark.parametrize("mode", ["fwd", "fwdbwd"])
def test_after_out_of_memory_nothing_stays_alive(mode):
    q, k, v = inputs(8192, grad=mode == "fwdbwd")
    ours = 3 * q.nbytes
    with VirtualCard(1) as card:
        out = wb.attention(q, k, v, PATTERN, backend="torch")
        upstream = torch.ones_like(out)
        forward = card.peak_requested_bytes
        if mode == "fwdbwd":
            ours += 2 * out.nbytes + 4 * 8192 * 2  # out, its gradient and lse
        else:
            del out, upstream
        assert card.allocated_bytes == ours
        ceiling = ours + (q.nbytes if mode == "fwdbwd" else (forward - ours) // 2)
        card.allocator.empty_cache()
        card.allocator.limit = ceiling
        with pytest.raises(torch.OutOfMemoryError) as caught:
            if mode == "fwdbwd":
                torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
            else:
                wb.attention(q, k, v, PATTERN, backend="torch")
        assert card.allocated_bytes == ours, "while the error is still held"
        del caught
        card.allocator.limit = MIB * KIB
        wb.attention(q, k, v, PATTERN, backend="torch")  # and the card goes on


def test_results_of_operators_that_cannot_be_planned():
    x = torch.ones(4 * MIB)
    with VirtualCard(40 / 1024) as card:
        with pytest.raises(OutOfMemory):
            x.nonzero()  # 32 MiB, which nobody knows before
        assert card.allocated_bytes == x.nbytes
        assert len(x[:1000].nonzero()) == 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_the_same_bits(dtype):
    q, k, v = inputs(777, dtype=dtype)
    want = gradients(q, k, v)
    with VirtualCard(1):
        got = gradients(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_random_numbers_are_the_same():
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
    x = torch.randn(2, 9, 16)

    def step():
        torch.manual_seed(3)
        loss = (model(x) * torch.rand(1) + torch.randint(9, (1,), generator=torch.Generator().manual_seed(1))).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    want = step()
    with VirtualCard(1):
        got = step()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf"), None, True, [8]])
def test_sizes_that_no_card_has(gib):
    with pytest.raises(ValueError, match="gib="):
        VirtualCard(gib)


def test_a_card_in_a_card_is_refused():
    with VirtualCard(1) as outer:
        for inner in (outer, VirtualCard(2)):
            with pytest.raises(RuntimeError, match="in use"), inner:
                pass
        kept = torch.ones(100)
        assert outer.allocated_bytes == kept.nbytes + 112
    with outer:  # again, with what is alive
        torch.ones(100)
    assert outer.peak_requested_bytes == 800
