from mpkit.wrap.wrapped import Wrapped
class TensorParallel(Wrapped): pass
