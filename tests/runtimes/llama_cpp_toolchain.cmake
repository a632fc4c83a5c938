# What both builds of llama.cpp have in common in tests, so that the second one compiles only the kernels (see native_builds.py).
# Position-independent: the same objects make the program llama-server and libllama.so.
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_PROJECT_llama.cpp_INCLUDE "${CMAKE_CURRENT_LIST_DIR}/llama_cpp_targets.cmake")
