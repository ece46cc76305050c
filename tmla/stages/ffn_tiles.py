"""placeholder"""


def ffn_rows_simt(*a):
    raise NotImplementedError
