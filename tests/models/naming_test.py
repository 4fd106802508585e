import pytest

from tests.models.published import COUNTS
from tunix.models import families, naming


def test_the_parts_of_a_name():
  names = naming.ModelNaming("meta-llama/Llama-3.1-8B")
  assert names.model_name == "llama-3.1-8b"
  assert (names.model_family, names.model_version) == ("llama3p1", "8b")
  assert names.model_config_category == "llama3"
  assert names.model_config_id == "llama3p1_8b"
  assert naming.ModelNaming(model_name="llama-3.1-8b").model_config_id == "llama3p1_8b"


@pytest.mark.parametrize("preset", COUNTS)
def test_every_repository_leads_to_its_preset(preset):
  names = naming.ModelNaming(COUNTS[preset][0])
  family, make = families.preset(names.model_config_id)
  assert make() == families.preset(preset)[1]()
  assert names.model_config_category == family.name


@pytest.mark.parametrize(
  "model_id, preset",
  [
    ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2p5_0p5b_instruct"),
    ("meta-llama/Llama-3.1-70B-Instruct", "llama3p1_70b"),
    ("google/gemma-1.1-2b-it", "gemma1p1_2b_it"),
    ("google/gemma-3-270m-it", "gemma3_270m_it"),
    ("Qwen/Qwen3-4B-Thinking-2507", "qwen3_4b_thinking_2507"),
    ("qwen3_0p6b", "qwen3_0p6b"),
  ],
)
def test_variants(model_id, preset):
  assert naming.ModelNaming(model_id).model_config_id == preset


def test_names_that_mean_nothing():
  with pytest.raises(
    ValueError, match=r"no preset is called 'llama3p1_9b'.*llama3p1_8b"
  ):
    naming.ModelNaming("meta-llama/Llama-3.1-9B")
  with pytest.raises(ValueError, match="both are None"):
    naming.ModelNaming()
  with pytest.raises(ValueError, match="means model_name 'qwen3-8b', not 'qwen3-4b'"):
    naming.ModelNaming("Qwen/Qwen3-8B", "qwen3-4b")
  with pytest.raises(ValueError, match="has no name"):
    naming.ModelNaming("Qwen/")
