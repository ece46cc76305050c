"""The cases of the package's own kernels. To add one: a line in the list of the file where it belongs."""

from . import cases_chunk, cases_chunk_rows, cases_doctor, cases_matrix, cases_models, cases_rows

CASES = [
    *cases_matrix.CASES,
    *cases_rows.CASES,
    *cases_chunk.CASES,
    *cases_chunk_rows.CASES,
    *cases_models.CASES,
    *cases_doctor.CASES,
]
