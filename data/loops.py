def loops(tokens):
    return False
