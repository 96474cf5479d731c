import importlib, pkgutil, sys, traceback
import powertrain
bad=0
for m in pkgutil.walk_packages(powertrain.__path__, "powertrain."):
    if "tensorflow" in m.name or ".jax" in m.name: continue
    try: importlib.import_module(m.name)
    except Exception as e: bad+=1; print(m.name, type(e).__name__, str(e)[:300])
print("bad", bad)
