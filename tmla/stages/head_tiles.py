"""placeholder"""


def absorb_rows_simt(*a):
    raise NotImplementedError


def value_rows_simt(*a):
    raise NotImplementedError
