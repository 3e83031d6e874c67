"""The mutants of the campaign fit today's code, so a change of the code corrects them too."""

from tests.campaigns.mutation.mutants import GUARDS, ROOT, TABLE, find_missing, read_mutants

MUTANTS = read_mutants(TABLE.read_text("utf-8"))


def test_each_mutant_changes_one_place_of_its_file_and_parses():
    sources = {path: (ROOT / path).read_text("utf-8") for path in {m.path for m in MUTANTS}}
    for mutant in MUTANTS:
        assert mutant.mutate(sources[mutant.path]) != sources[mutant.path]


def test_each_subject_has_mutants_and_tests_that_exist():
    assert {mutant.subject for mutant in MUTANTS} == set(GUARDS)
    assert find_missing(GUARDS) == []
