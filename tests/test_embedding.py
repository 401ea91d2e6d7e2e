"""Looking up rows: right rows, right dtype, and an error that names the id that is no row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_engine.embedding import Embedding, check_ids


def table(vocab=11, hidden=4, dtype=torch.float32):
    embedding = Embedding(vocab, hidden)
    torch.manual_seed(0)
    embedding.weight.data = torch.randn(vocab, hidden, dtype=dtype)
    return embedding


@given(ids=st.lists(st.lists(st.integers(0, 10), min_size=3, max_size=3), min_size=1, max_size=4))
def test_every_token_gets_the_row_of_its_id(ids):
    embedding = table()
    out = embedding(torch.tensor(ids))
    for row, wanted in zip(out, ids, strict=True):
        for vector, i in zip(row, wanted, strict=True):
            assert torch.equal(vector, embedding.weight[i])


def test_lookup_equals_one_hot_times_table():
    embedding = table()
    ids = torch.tensor([[3, 0, 10], [7, 7, 1]])
    one_hot = torch.nn.functional.one_hot(ids, 11).float()
    assert torch.equal(embedding(ids), one_hot @ embedding.weight)


@pytest.mark.parametrize("bad", [-1, -11, 11, 50_000])
def test_an_id_that_is_no_row_is_named(bad):
    """Plain indexing takes -1 for the last row and says nothing; other ids get an error without the id."""
    with pytest.raises(ValueError, match=rf"token id {bad} at \[1, 2\].*0 to 10"):
        table()(torch.tensor([[1, 2, 3], [4, 5, bad]]))


@pytest.mark.parametrize("ids", [[], [0], [10], [[0, 10], [3, 4]]])
def test_the_whole_range_passes_the_check(ids):
    check_ids(torch.tensor(ids, dtype=torch.long), 11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("id_dtype", [torch.int64, torch.int32])
def test_dtypes(dtype, id_dtype):
    embedding = table(dtype=dtype)
    out = embedding(torch.tensor([[2, 5]], dtype=id_dtype))
    assert out.dtype == dtype
    assert torch.equal(out[0, 1], embedding.weight[5])
