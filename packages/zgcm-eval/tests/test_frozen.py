import json

import pytest

from zgcm_eval import HeldoutDocument, HeldoutSet, HeldoutSetError, freeze_heldout, load_heldout


def test_a_frozen_set_comes_back_as_it_was(tmp_path, heldout_sets):
    odd = HeldoutSet(
        "odd", (HeldoutDocument("a", "one\u2028two\u0085three\r\nfour"), HeldoutDocument("b", ""))
    )
    digest = freeze_heldout(tmp_path / "set", [*heldout_sets, odd])
    assert load_heldout(tmp_path / "set") == [*heldout_sets, odd]
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert manifest["format"] == "zgcm-heldout/1"
    assert manifest["digest"] == digest
    assert manifest["domains"][0]["documents"] == 10
    assert manifest["domains"][1]["bytes"] == sum(len(d.text.encode()) for d in heldout_sets[1].documents)
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "code.jsonl",
        "manifest.json",
        "odd.jsonl",
        "prose.jsonl",
    ]


def test_a_changed_document_is_refused(tmp_path, heldout_sets):
    freeze_heldout(tmp_path, heldout_sets)
    path = tmp_path / "prose.jsonl"
    path.write_text(path.read_text().replace("kurzer", "langer"))
    with pytest.raises(HeldoutSetError, match=r"prose\.jsonl was changed after it was frozen.*[0-9a-f]{64}"):
        load_heldout(tmp_path)


def test_a_changed_manifest_is_refused(tmp_path, heldout_sets):
    freeze_heldout(tmp_path, heldout_sets)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["domains"].pop()
    path.write_text(json.dumps(manifest))
    with pytest.raises(HeldoutSetError, match=r"manifest\.json was changed after it was frozen"):
        load_heldout(tmp_path)


def test_what_is_no_set_is_refused_with_its_name(tmp_path, heldout_sets):
    with pytest.raises(HeldoutSetError, match=r"manifest\.json is missing; give the folder"):
        load_heldout(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(HeldoutSetError, match="is not JSON"):
        load_heldout(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "other/1"}')
    with pytest.raises(HeldoutSetError, match="not a manifest of format 'zgcm-heldout/1'"):
        load_heldout(tmp_path)
    freeze_heldout(tmp_path / "set", heldout_sets)
    (tmp_path / "set" / "code.jsonl").unlink()
    with pytest.raises(HeldoutSetError, match=r"code\.jsonl is missing although the manifest names it"):
        load_heldout(tmp_path / "set")


def test_a_frozen_set_is_never_written_over(tmp_path, heldout_sets):
    freeze_heldout(tmp_path, heldout_sets)
    with pytest.raises(HeldoutSetError, match="already holds a frozen set"):
        freeze_heldout(tmp_path, heldout_sets[:1])
    assert len(load_heldout(tmp_path)) == 2


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_a_domain_that_is_no_file_name_is_refused(tmp_path, name):
    with pytest.raises(HeldoutSetError, match="must be a file name"):
        freeze_heldout(tmp_path / "set", [HeldoutSet(name, (HeldoutDocument("a", "x"),))])
    assert not (tmp_path / "set").exists()


def test_two_domains_of_one_name_are_refused(tmp_path, heldout_sets):
    with pytest.raises(HeldoutSetError, match="must be a file name of its own"):
        freeze_heldout(tmp_path / "set", [heldout_sets[0], heldout_sets[0]])
