# All but the kernels is compiled with less effort: two thirds of the time, and the same answers.
foreach(target llama llama-common mtmd server-context llama-server-impl llama-server)
  cmake_language(EVAL CODE "cmake_language(DEFER CALL target_compile_options ${target} PRIVATE -O1)")
endforeach()
# Relative paths in what they include: it is then the same in every folder.
cmake_language(DEFER CALL set_target_properties llama PROPERTIES UNITY_BUILD_RELOCATABLE ON)
# libllama.so, made only where it is asked for.
cmake_language(DEFER CALL add_library libllama SHARED EXCLUDE_FROM_ALL
  $<TARGET_OBJECTS:llama> $<TARGET_OBJECTS:ggml> $<TARGET_OBJECTS:ggml-cpu> $<TARGET_OBJECTS:ggml-base>)
cmake_language(DEFER CALL set_target_properties libllama PROPERTIES OUTPUT_NAME llama)
cmake_language(DEFER CALL target_link_options libllama PRIVATE -fopenmp)
