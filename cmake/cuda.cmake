# Finds nvcc and turns the CUDA language on; says so when it is missing and AUTO lets the build go
# on. Sets FP8KVD_HAVE_CUDA. The CUDA runtime is linked statically: a binary needs only the driver.
#
# fp8kvd_cuda_library(name HDRS … SRCS … SM90_SRCS … PUBLIC_DEPS … PRIVATE_DEPS … VISIBLE_TO …)
#   As fp8kvd_library, for a folder with .cu files. SRCS (.cc and .cu) are compiled for every
#   architecture of FP8KVD_CUDA_ARCHS, SM90_SRCS for 90a only (for none when 90a is not listed).
#   A kernel that spills registers or keeps arrays in local memory does not compile.

set(FP8KVD_HAVE_CUDA FALSE)
if(NOT FP8KVD_CUDA STREQUAL "OFF")
  find_program(FP8KVD_NVCC nvcc
    HINTS /usr/local/cuda/bin ${CMAKE_SOURCE_DIR}/build/cuda-pypi/bin
    DOC "The CUDA compiler; tests/run puts one from PyPI into build/cuda-pypi where it is missing")
  if(FP8KVD_NVCC)
    set(FP8KVD_HAVE_CUDA TRUE)
  elseif(FP8KVD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FP8KVD_CUDA=ON, but nvcc is neither on PATH nor in /usr/local/cuda/bin")
  endif()
endif()

if(FP8KVD_HAVE_CUDA)
  set(CMAKE_CUDA_COMPILER ${FP8KVD_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # ours: 90a only where a source needs it
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # unknown to CMake 3.25
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo")
  set(CMAKE_CUDA_FLAGS "--expt-relaxed-constexpr")  # std::bit_cast in code of host and device
  # CMake's own FindCUDAToolkit wants a whole toolkit; nvcc and the runtime from PyPI are enough.
  get_filename_component(root ${FP8KVD_NVCC} REALPATH)
  get_filename_component(root ${root}/../.. ABSOLUTE)
  find_library(FP8KVD_CUDART cudart_static HINTS ${root}/lib64 ${root}/lib REQUIRED)
  add_library(CUDA::cudart_static UNKNOWN IMPORTED)
  set_target_properties(CUDA::cudart_static PROPERTIES
    IMPORTED_LOCATION ${FP8KVD_CUDART}
    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}"
    INTERFACE_LINK_LIBRARIES "Threads::Threads;dl;rt")
  message(STATUS "CUDA backend: ${FP8KVD_NVCC}, architectures ${FP8KVD_CUDA_ARCHS}")
else()
  message(STATUS "CUDA backend: not built (FP8KVD_CUDA=${FP8KVD_CUDA}, no nvcc in use): CPU only")
endif()

set(FP8KVD_CUDA_WARNINGS --Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Wshadow,-Werror
  -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error)

# _fp8kvd_gencode(SRCS … ARCHS …): sets the architectures of the .cu files among SRCS.
function(_fp8kvd_gencode)
  cmake_parse_arguments(A "" "" "SRCS;ARCHS" ${ARGN})
  list(FILTER A_SRCS INCLUDE REGEX "\\.cu$")
  foreach(arch IN LISTS A_ARCHS)
    list(APPEND gencode "-gencode=arch=compute_${arch},code=sm_${arch}")
  endforeach()
  set_source_files_properties(${A_SRCS} PROPERTIES COMPILE_OPTIONS "${gencode}")
endfunction()

function(fp8kvd_cuda_library name)
  cmake_parse_arguments(A "" "" "HDRS;SRCS;SM90_SRCS;PUBLIC_DEPS;PRIVATE_DEPS;VISIBLE_TO" ${ARGN})
  _fp8kvd_gencode(SRCS ${A_SRCS} ARCHS ${FP8KVD_CUDA_ARCHS})
  if("90a" IN_LIST FP8KVD_CUDA_ARCHS)
    _fp8kvd_gencode(SRCS ${A_SM90_SRCS} ARCHS 90a)
  else()
    set(A_SM90_SRCS "")
  endif()
  fp8kvd_library(${name} HDRS ${A_HDRS} SRCS ${A_SRCS} ${A_SM90_SRCS}
    PUBLIC_DEPS ${A_PUBLIC_DEPS} CUDA::cudart_static PRIVATE_DEPS ${A_PRIVATE_DEPS}
    VISIBLE_TO ${A_VISIBLE_TO})
  target_compile_options(fp8kvd_${name} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:${FP8KVD_CUDA_WARNINGS}>")
endfunction()

# fp8kvd_link_archives(target): a binary that needs nothing but the C library and the driver.
function(fp8kvd_link_archives target)
  set_property(TARGET ${target} PROPERTY
    RULE_LAUNCH_LINK ${CMAKE_SOURCE_DIR}/cmake/link_archives.sh)
  target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc)
endfunction()
