"""The gradient of a table that a backward pass adds to its sum: on a CPU, on a GPU."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from nanochat_core.model.gradient_sum import GradientSum
from nanochat_core.model.layers import Embedding
from nanochat_core.model.tables import gradient as table_gradient
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.optim.ranks import RATES, adding_lookups, gradients_of, make_model

pytestmark = pytest.mark.torch


def test_tokens_are_sorted_and_stay_in_order_within_a_row():
    tokens = torch.tensor([[3, 1, 3], [0, 3, 1]])
    for rows in (5, 40_000):
        ordered, order, starts = table_gradient.sort(tokens, rows)
        assert ordered.tolist() == [0, 1, 1, 3, 3, 3]
        assert order.tolist() == [3, 1, 5, 0, 2, 4]
        assert starts.tolist() == [0, 1, 3, 3, 6, *[6] * (rows - 4)]
    assert table_gradient.sort(torch.tensor([32_767]), 2**15)[0].tolist() == [32_767]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_a_plain_lookup_and_their_gradients_add_up(dtype):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (3, 40), generator=generator)  # each row some six times
    grad = torch.randn(3, 40, 8, generator=generator).to(dtype)
    table = torch.nn.Parameter(torch.randn(32, 8, generator=generator).to(dtype))
    total, calls = torch.full((32, 8), torch.nan), []
    into = GradientSum(table.device, lambda: (total, bool(calls)), calls.append)
    exact = torch.zeros(32, 8).double().index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    for count in (1, 2):
        rows = table_gradient.lookup(tokens, table, into)
        assert torch.equal(rows, F.embedding(tokens, table))
        rows.backward(grad)
        assert len(calls) == count
        assert table.grad is None
        torch.testing.assert_close(total.double(), count * exact, atol=1e-5, rtol=1e-5)
    assert not total[20:].any()


def test_the_operator_keeps_torchs_rules_for_its_like():
    grad, tokens = torch.randn(2, 5, 8), torch.randint(4, (2, 5))
    into = GradientSum(grad.device, lambda: (torch.zeros(4, 8), True), lambda proxy: None)
    torch.library.opcheck(
        table_gradient.add_lookup_gradient,
        (grad, *table_gradient.sort(tokens, 4), into.number),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_pass_is_one_graph_and_sorts_once():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = []

    def count(graph, inputs):
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    tokens = torch.randint(20, (2, 16), generator=torch.Generator().manual_seed(1))
    tables = [Embedding(20, 8, torch.float32) for _ in range(3)]
    totals = [torch.zeros(20, 8) for _ in tables]
    for table, total in zip(tables, totals, strict=True):
        torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(2))
        into = GradientSum(table.weight.device, lambda t=total: (t, True), lambda _: None)
        table.gradient_sum = into

    def loss():
        return torch.stack([(k + 1) * t(tokens) for k, t in enumerate(tables)]).square().sum()

    with adding_lookups():
        loss().backward()
        expected = [total.clone() for total in totals]
        # The partition that inductor takes; it merges equal operations.
        divide = min_cut_rematerialization_partition
        backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=divide)
        torch.compile(loss, backend=backend, fullgraph=True)().backward()
    assert len(graphs) == 2
    assert sum(graph["aten.sort.stable"] for graph in graphs) == 1
    assert graphs[1]["nanochat_flows.add_lookup_gradient.default"] == 3
    assert all(table.weight.grad is None for table in tables)
    for total, once in zip(totals, expected, strict=True):
        assert once.any()
        torch.testing.assert_close(total, 2 * once)


def test_value_embeddings_share_a_sort_also_where_nothing_is_compiled(monkeypatch):
    """The embedding of the tokens sorts by itself."""
    calls = []
    sort = table_gradient.sort
    monkeypatch.setattr(table_gradient, "sort", lambda *a: (calls.append(a[1]), sort(*a))[1])
    tokens = torch.randint(60, (2, 16), generator=torch.Generator().manual_seed(1))
    with adding_lookups():
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        optimizer.backward(model.summed_loss(tokens, tokens.roll(1)), last=True)
        assert calls == [64, 64]
        with torch.no_grad():
            model.summed_loss(tokens, tokens.roll(1))
        assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "text", "one"])
@pytest.mark.parametrize("channels", [64, 640, 1536])
def test_a_gpu_adds_what_float64_adds_and_the_same_bits_every_time(channels, kind):
    frequent = 1 / torch.arange(1, 1001.0)
    frequent = {"uniform": torch.ones(1000), "text": frequent, "one": F.one_hot(torch.tensor(999))}
    tokens = torch.multinomial(frequent[kind].float(), 16384, replacement=True).cuda()
    grad = torch.randn(16384, channels, device="cuda").bfloat16()
    table = torch.zeros(1000, channels, device="cuda").bfloat16()
    expected = torch.zeros(1000, channels, device="cuda").double()
    expected.index_add_(0, tokens, grad.double())
    found = []
    for _ in range(5):
        total, calls = torch.full((1000, channels), torch.nan, device="cuda"), []
        into = GradientSum(table.device, lambda t=total, c=calls: (t, bool(c)), calls.append)
        for _ in range(2):
            table_gradient.lookup(tokens, table, into).backward(grad)
        found.append(total)
    assert all(torch.equal(total, found[0]) for total in found)
    torch.testing.assert_close(found[0].double(), 2 * expected, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler has some for what is as it should be
def test_a_gpu_adds_the_same_gradients_compiled_and_not():
    device = torch.device("cuda")
    tokens = torch.randint(60, (4, 16), device=device)
    found = []
    for compiled in (False, True):
        model = make_model(device=device)
        optimizer = Optimizer(model, RATES, precision="fp32", world=ALONE)
        if compiled:
            model.compile_passes()
        for _ in range(2):
            optimizer.backward(model.summed_loss(tokens, tokens.roll(1)), last=False)
            assert model.transformer.wte.weight.grad is None
        tables = "transformer.wte", "value_embeds"
        found.append({n: g for n, g in gradients_of(optimizer).items() if n.startswith(tables)})
    assert len(found[0]) == 3
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-3, msg=name)
